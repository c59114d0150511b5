"""Everything that made the demonstration model, which is in the package as `dynamo.reference.demo`.

`lessons` write questions with their answers, `conversations` makes chats of them, `vocabulary` the tokenizer, `train`
the weights (extra `train`); `examine` asks what was held back; `sight` and `looking` teach a model to see. Run with
`tools` on the path: `PYTHONPATH=tools python -m demo_model.train --out DIR`.
"""
