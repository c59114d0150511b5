"""The raw material of the lessons: words, names, places, and made-up ones, so that no list is the whole world."""

from __future__ import annotations

from random import Random
from typing import Final

__all__ = [
    "ANIMALS",
    "CITIES",
    "COLOURS",
    "FOODS",
    "JOBS",
    "NAMES",
    "THINGS",
    "TOPICS",
    "WORDS",
    "name",
    "place",
    "pseudo_word",
    "word",
]


def _listed(text: str, mark: str | None = None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(mark))


WORDS: Final = _listed(
    """able acid acorn actor adult agent alarm album alert alley amber angle ankle apple april apron arena armor arrow
    aspen atlas attic audio award bacon badge baker banana banjo barn basil basin beach beacon bean bear beaver bell
    belt bench berry bird bison black blade blanket block bloom blue board boat bone book boot bottle bowl box branch
    brass bread breeze brick bridge brook broom brown brush bucket bug bulb bunny butter button cabin cable cactus cake
    camel camera camp canal candle candy canoe canyon cap carbon card carpet carrot castle cat cave cedar cellar chain
    chair chalk cheese cherry chess chest chief circle citrus clay cliff cloak clock cloud clover coach coal coast
    cobra coconut coffee coin comet copper coral corn cotton couch crab crane cream creek cricket crown crystal cup
    curtain daisy dance dawn deer desert desk dice dinner dish dock dog doll dolphin donkey door dove dragon drawer
    dream dress drum duck dune dust eagle earth echo edge eel egg elbow elder elm ember engine envelope fabric falcon
    farm feather fence fern ferry field fig finch fire fish flag flame flint flock floor flour flower flute fog forest
    fork fort fossil fountain fox frame frog frost fruit galaxy garden garlic gate gem ghost giant ginger giraffe glass
    globe glove goat gold goose grain granite grape grass gravel guitar gull hammer harbor hare harp hat hawk hazel
    heart hedge helmet heron hill hinge honey hook horn horse hotel house ice icon igloo inch ink insect iris iron
    island ivory ivy jacket jam jar jasmine jelly jewel juice jungle kayak kettle kiosk kite kitten knee knife knot
    label ladder lake lamb lamp lantern lark laser latch lava lawn leaf lemon lens library light lily lime linen
    lion lizard llama lobster lock lotus lunch magnet mango maple marble market marsh mask meadow melon metal meteor
    midnight milk mill mint mirror mist mitten mole monkey moon moose moss moth motor mountain mouse mouth muffin
    museum music nail napkin nectar needle nest nickel night north notebook nut oak oasis oat ocean olive onion opal
    orange orbit orchid otter oven owl oyster paddle page paint palace palm panda paper parrot pasta path peach peanut
    pear pearl pebble pen pencil penguin pepper piano picnic pigeon pillow pilot pine pirate planet plate plum pocket
    poem pond pony poppy potato prism puddle pumpkin puppet python quail quartz queen quill quilt quiz rabbit radio
    radish raft rain ranch raven razor reef ribbon rice ring river road robin robot rocket roof root rope rose ruby
    saddle sail salad salmon salt sand satin scarf school sea seal season seed shadow shark sheep shell ship shirt shoe
    shore silk silver sky sled slope smoke snail snake snow soap sock sofa soup south spark sparrow spice spider spoon
    spring spruce square squid stable stairs star statue steam steel stone storm stove straw stream street sugar summer
    sun swan sweater sword syrup table tail tea temple tent thistle thorn thread thunder tiger timber toast tomato
    torch tower toy track trail train tree trout trumpet tulip tunnel turkey turtle valley vase velvet village vine
    violet violin volcano wagon wall walnut wasp watch water wave wax well whale wheat wheel whistle willow wind window
    wing winter wire wizard wolf wood wool yard yarn zebra zinc zipper hello world strawberry mississippi library"""
)
NAMES: Final = _listed(
    """Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Tom Alice Bob
    Carol Eve Frank Ivan Jane John Lisa Mark Mary Nina Oscar Peter Sara Victor Wendy Yuki Zoe Omar Priya Chen Amir
    Lena Hugo"""
)
CITIES: Final = _listed(
    """Paris London Berlin Rome Madrid Oslo Vienna Lisbon Dublin Prague Athens Cairo Tokyo Delhi Lima Boston Chicago
    Denver Austin Seattle Toronto Sydney Zurich Geneva Hamburg Munich Milan Warsaw Helsinki Seoul Kyoto Nairobi Quito
    Bern Riga"""
)
COLOURS: Final = _listed("red blue green yellow black white brown orange purple pink grey")
ANIMALS: Final = _listed("cat dog horse rabbit parrot goat hamster turtle snake fish pony mouse")
FOODS: Final = _listed("pizza soup rice pasta bread cheese apples fish cake salad honey noodles")
JOBS: Final = _listed("baker teacher doctor pilot painter farmer nurse lawyer singer driver cook writer")
THINGS: Final = _listed(
    "key book lamp phone bag hat cup ring map coat pen box ball clock watch ticket camera umbrella bike"
)
TOPICS: Final = _listed(
    """love|the moon|the ocean|history|black holes|physics|quantum computers|my garden|football|music|Shakespeare|
    the weather tomorrow|climate change|a dragon|my holiday|a birthday party|the stock market|good wine|chess openings|
    machine learning|the French revolution|World War II|old Rome|the meaning of life|my cat|a job interview|healthy food|
    yoga|electric cars|a trip to Japan|the solar system|dinosaurs|space travel|poetry|friendship|winter|a lost key|
    democracy|the internet|bread baking|a startup|good sleep|bitcoin|a haunted house|algebra|photosynthesis|gravity|
    my boss|the news|a new phone|a love letter|the Python language|sorting algorithms|a web server|databases|Rust|
    neural networks|the piano|Beethoven|jazz|painting|Mars|evolution|vaccines|a mortgage|taxes|marathon training|
    how engines work|why the sky is blue|the tallest mountain|the capital of France|the president|the speed of light|
    a good movie|a book for children|the best phone|the population of China|my homework|the number pi|a pirate|
    a robot|tea|coffee|the Eiffel tower|tigers|volcanoes|earthquakes|rain|a short story|the end of the world""",
    "|",
)
_ONSETS: Final = _listed("b c d f g h j k l m n p r s t v w z br cr dr fl gr pl st tr sh ch th")
_VOWELS: Final = _listed("a e i o u a e i o ai ee oo ou")
_CODAS: Final = ("", "", "", *_listed("n r s t l m k p d g x nd rt st ck"))


def pseudo_word(rng: Random) -> str:
    """Return a word that nobody has seen before, mostly pronounceable; 3 to 9 letters."""
    if rng.random() < 0.15:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
    text = ""
    for _ in range(rng.choice((1, 2, 2, 2, 3))):
        text += rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    return text[:9] if len(text) >= 3 else text + rng.choice("nrst") + rng.choice("aeo")


def word(rng: Random) -> str:
    """Return a word to spell, count or turn round; half of them exist."""
    return rng.choice(WORDS) if rng.random() < 0.5 else pseudo_word(rng)


def name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.75 else pseudo_word(rng).capitalize()


def place(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()
