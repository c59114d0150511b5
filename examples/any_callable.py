"""An endpoint in ten lines: a function that takes the conversation and yields text.

    cd examples && dynamo serve --engine any_callable:count_words

It also runs alone: python examples/any_callable.py --discovery-backend file
"""

import asyncio


async def count_words(messages, temperature=1.0):
    """Counts the words of the last message, aloud."""
    words = messages[-1]["content"].split()
    for number, word in enumerate(words, 1):
        await asyncio.sleep(0.01 * temperature)
        yield f"{number}. {word}\n"
    yield f"{len(words)} words."


if __name__ == "__main__":
    from dynamo.common.backend.run import run
    from dynamo.engines.callable.engine import engine_class

    run(engine_class(count_words))
