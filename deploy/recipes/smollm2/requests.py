"""Requests as users make them, from a grammar of our own: what the drafter learns beside the target's own prompts.

A small target left to itself writes much of the same. These are tasks about many things, sums, texts to work on, and
Python functions to finish, whose examples are computed. Nothing here is taken from a benchmark; `drafter generate`
leaves out any that overlaps with one.

    python deploy/recipes/smollm2/requests.py --count 2000 --seed 1 > requests.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any


def _split(words: str) -> list[str]:
    return [" ".join(word.split()) for word in words.split(";")]


TOPICS = """\
black holes; photosynthesis; inflation; the water cycle; supply and demand; electric cars; beekeeping; jazz; chess;
the Silk Road; vaccines; earthquakes; sourdough bread; machine learning; tides; the Roman aqueducts; opera; coral reefs;
democracy; the printing press; solar panels; migration of birds; insomnia; compound interest; plate tectonics;
the human heart; recycling; public libraries; remote work; long distance running; antibiotics; the French Revolution;
volcanoes; friendship; noise in cities; gardening on a balcony; the stock market; search engines; the moon; tea;
cryptography; glaciers; the immune system; rivers; school uniforms; a four day week; genetics; urban parks; magnets;
lighthouses; trade unions; wind power; digestion; the Olympic Games; ancient Egypt; batteries; bridges; memory;
dinosaurs; the theory of evolution; bicycles; email; robots; forests; the ozone layer; sleep; whales; clouds; money;
the speed of light; atoms; acids and bases; the brain; maps; languages; the Renaissance; photography; deserts"""
PLACES = """\
Kyoto; Lisbon; the Scottish Highlands; Marrakesh; Buenos Aires; Iceland; Hanoi; the Norwegian fjords; Cape Town; Prague;
Mexico City; the Alps; Istanbul; Nairobi; Montreal; Sicily; New Zealand; Havana; Seoul; the Amazon"""
PEOPLE = """\
a teacher; your neighbour; a new colleague; a customer; the landlord; an old friend; your manager; the city council;
a supplier; a job applicant; the head of a school; a travel agent; your doctor; the editor of a newspaper"""
ROLES = """\
a ship's captain; a detective; a gardener; a museum guide; a chef; a robot from the future; a medieval knight; a pilot;
a wise grandmother; a football coach; a mathematician; an astronaut on Mars; a librarian; a ghost; a poet; a blacksmith;
a stand-up comedian; a judge; a weather forecaster; an economist"""
MATTERS = """\
a delayed order; a broken heater; a day off; a meeting that must be moved; a refund; a loud party; feedback on a draft;
a lost parcel; an invitation to dinner; a letter of recommendation; parking; a new project; a change of address"""
THINGS = """\
a wooden chair; a pair of headphones; a fountain pen; an umbrella; a coffee machine; a backpack; a desk lamp; a tent;
a mobile phone; a kitchen knife; a watch; running shoes; a travel guitar; a water bottle; a board game"""
PAIRS = """\
cats and dogs; tea and coffee; cities and villages; books and films; planes and trains; classical music and pop;
lists and tuples; TCP and UDP; bacteria and viruses; weather and climate; mass and weight; renting and buying;
stocks and bonds; butterflies and moths; planets and stars; a virus and a worm; speed and velocity; HTML and CSS;
compilers and interpreters; mitosis and meiosis; reptiles and amphibians; arithmetic and geometric means"""
SENTENCES = """\
The train was late because snow had covered the tracks; She sold her car and bought two bicycles; Our shop opens at
nine and closes at six; The results were better than anyone had hoped; He forgot his keys at the office again; The river
rose by two metres in a single night; My sister plays the violin and teaches mathematics; The museum was founded in
1902 by a retired sailor; They walked for hours without meeting anyone; The new bridge cost twice as much as planned;
Three of the five engines failed during the test; The soup needs more salt and a little lemon; Nobody knows who painted
this portrait; The children built a house out of old boxes; Prices rose by four percent in March"""
REVIEWS = """\
The battery lasts two days but the screen scratches easily; I waited an hour for cold soup and will not come back;
Comfortable, light and cheaper than the old model; The plot is thin, yet the actors save the film; It stopped working
after a week and nobody answers my letters; A quiet room, a friendly host and an excellent breakfast; The manual is
useless but the machine itself runs well; Not bad for the price, though the colour is not what I ordered"""
LANGUAGES = "French; German; Spanish; Italian; Portuguese; Dutch"
COUNTS = "two; three; four; five; six; seven; ten"

TASKS = """\
Explain {topic} to a child of ten.
Explain in {count} sentences why {topic} matters.
What is the most common mistake people make about {topic}?
Give me {count} facts about {topic}, one a line.
Write a short essay on {topic}. Begin with a question.
Write an outline for a talk of twenty minutes about {topic}.
What are the advantages and disadvantages of {topic}? Answer with two lists.
How has our view of {topic} changed in the last hundred years?
Write {count} quiz questions with answers about {topic}.
Describe {topic} without using technical terms.
Who should care about {topic}, and why?
Write a dialogue between a sceptic and an expert about {topic}.
Summarise what is known about {topic} in one paragraph.
Suggest {count} titles for an article about {topic}.
Compose a haiku about {topic}, then explain it.
Write a poem of {count} lines about {topic}.
Is there a link between {topic} and {topic}? Give examples.
List the steps you would take to learn about {topic} in a month.
Plan three days in {place} for a family with small children.
What should I pack for a trip to {place} in winter?
Write a story that is set in {place} and ends with a surprise.
Draft a polite email to {person} about {matter}. Keep it short.
Write a letter to {person} about {matter}.
How do I tell {person} about {matter} without sounding rude?
You are {role}. Introduce yourself and tell me about your day.
Pretend to be {role} and answer: what do you think of {topic}?
Take the part of {role} who has just discovered {topic}. Stay in character.
Imagine a conversation between {role} and {role}.
Write an advertisement for {thing}.
Write a review of {thing} that you have used for a year.
How is {thing} made?
What is the difference between {pair}?
Compare {pair} in a table with {count} rows.
Which would you choose of {pair}, and why?
Translate this sentence into {language}: {sentence}.
Rewrite this sentence in {count} other ways: {sentence}.
Correct any errors in this text and explain them: {sentence}.
Turn this into a question: {sentence}.
Find the nouns and the verbs in this sentence: "{sentence}."
Continue this story in {count} sentences: {sentence}.
Is this review positive or negative? Give a reason. "{review}."
Extract the complaint, if there is one: "{review}."
Write a friendly answer of the company to this review: "{review}."
Read the notes and write one paragraph from them.\\n- {sentence}\\n- {sentence}\\n- {sentence}
Put these in alphabetical order and number them: {topic}, {topic}, {thing}, {place}.
If {sum_first} and {sum_second}, how many are there in all? Show your steps.
A shop sells {n} pens at {m} cents each. How much does it take in? Explain.
A train covers {n} km in {m} minutes. What is its speed in km per hour?
What is {n} percent of {big}? Show the calculation.
Solve for x: {m}x + {n} = {big}.
The sides of a rectangle are {n} cm and {m} cm. Find its area and its perimeter.
{n} workers need {m} days for a wall. How long do {count} workers need?
Which of these numbers are prime: {n}, {m}, {big}? Explain how you know.
Write a Python function that {job}.
Write a Python program that {job}. Explain how it works.
How would you write a function in JavaScript that {job}?
Write unit tests for a function that {job}.
What does this line of Python do?\\n{line}
Find the bug in this code and mend it.\\n```python\\n{buggy}\\n```"""
JOBS = """\
counts the vowels of a text; reverses the words of a sentence; finds the second largest number of a list; reads a CSV
file and sums a column; checks whether a bracketed text is balanced; merges two sorted lists; removes duplicates and
keeps the order; converts Celsius to Fahrenheit; finds all divisors of a number; counts how often each word occurs;
rotates a list by k places; writes the first n Fibonacci numbers; tells whether two words are anagrams; flattens a
nested list; finds the longest word of a text; computes a factorial without recursion; sorts people by age;
prints a multiplication table; draws a triangle of stars; validates an email address; does a binary search"""
LINES = """\
total = sum(x * x for x in range(10)); names = sorted(set(names), key=len); first, *rest = values;
print("".join(reversed(text))); pairs = dict(zip(keys, values)); even = [n for n in numbers if n % 2 == 0];
count = max(words, key=words.count); matrix = [[0] * 3 for _ in range(3)]"""
BUGGY = (
    "def mean(numbers):\n    total = 0\n    for n in numbers:\n        total = n\n    return total / len(numbers)",
    "def is_even(n):\n    return n % 2 == 1",
    "def last(items):\n    return items[len(items)]",
    "def greet(name)\n    print('Hello ' + name)",
    "def countdown(n):\n    while n > 0:\n        print(n)",
    "def squares(numbers):\n    for n in numbers:\n        out = []\n        out.append(n * n)\n    return out",
    "def find(items, wanted):\n    for i, item in enumerate(items):\n        if item is wanted:\n            return i\n"
    "        return -1",
)

Numbers = list[int]
Step = tuple[str, str, Callable[[Numbers], Any]]
CHOICES: tuple[Step, ...] = (
    ("all", "the numbers", lambda xs: xs),
    ("even", "the even numbers", lambda xs: [x for x in xs if x % 2 == 0]),
    ("odd", "the odd numbers", lambda xs: [x for x in xs if x % 2]),
    ("positive", "the positive numbers", lambda xs: [x for x in xs if x > 0]),
    ("negative", "the negative numbers", lambda xs: [x for x in xs if x < 0]),
    ("distinct", "the distinct numbers", lambda xs: sorted(set(xs))),
    ("first_half", "the first half of the numbers (the middle one left out)", lambda xs: xs[: len(xs) // 2]),
    ("every_second", "every second number, beginning with the first", lambda xs: xs[::2]),
    ("big", "the numbers above ten", lambda xs: [x for x in xs if x > 10]),
    ("multiples", "the multiples of three", lambda xs: [x for x in xs if x % 3 == 0]),
)
RESULTS: tuple[Step, ...] = (
    ("sum", "the sum of", sum),
    ("count", "how many there are of", len),
    ("largest", "the largest of", lambda xs: max(xs, default=None)),
    ("smallest", "the smallest of", lambda xs: min(xs, default=None)),
    ("squares", "a list of the squares of", lambda xs: [x * x for x in xs]),
    ("sorted", "in ascending order", sorted),
    ("reversed", "in reverse order", lambda xs: xs[::-1]),
    ("range", "the difference between the largest and the smallest of", lambda xs: max(xs) - min(xs) if xs else 0),
    ("doubled", "a list of the doubles of", lambda xs: [2 * x for x in xs]),
    ("running", "the running totals of", lambda xs: [sum(xs[: i + 1]) for i in range(len(xs))]),
    ("text", "a text in which commas part", lambda xs: ",".join(map(str, xs))),
    ("average", "the mean, or 0 where there are none, of", lambda xs: sum(xs) / len(xs) if xs else 0),
)
WORDS = _split("apple; river; stone; cloud; window; table; green; music; paper; night; seven; orange; little; silver")
TEXT_STEPS: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("count_vowels", "the number of vowels in the text", lambda t: sum(c in "aeiou" for c in t)),
    ("longest_word", "the longest word of the text, the first one of several", lambda t: max(t.split(), key=len)),
    ("capitalize_words", "the text with a capital letter at the start of each word", str.title),
    ("reverse_words", "the words of the text in reverse order", lambda t: " ".join(t.split()[::-1])),
    ("word_lengths", "a list of the lengths of the words", lambda t: [len(w) for w in t.split()]),
    ("without_vowels", "the text without its vowels", lambda t: "".join(c for c in t if c not in "aeiou")),
    ("letter_counts", "a dictionary of how often each letter occurs", lambda t: {c: t.count(c) for c in t if c > " "}),
    ("is_palindrome", "whether the text reads the same backwards", lambda t: t == t[::-1]),
    ("initials", "the first letters of the words, in capitals", lambda t: "".join(w[0].upper() for w in t.split())),
    (
        "first_repeated",
        "the first letter that occurs twice, or None",
        lambda t: next((c for c in t if t.count(c) > 1), None),
    ),
    ("swap_case", "the text with small letters made large and large ones small", str.swapcase),
    ("unique_words", "the sorted list of the different words", lambda t: sorted(set(t.split()))),
)
INSTRUCTIONS = (
    "Finish this Python function.",
    "Write the body of this function and show the whole of it.",
    "Implement the function below in Python.",
    "Here is the head of a Python function. Please write the rest.",
    "Fill in the missing code:",
    "Can you complete this for me?",
    "This function has no body yet. Return the full code.",
)
NUMBER_NAMES, TEXT_NAMES = ("numbers", "values", "items", "nums", "data", "lst"), ("text", "s", "sentence", "string")


SLOTS: dict[str, Sequence[str]] = {
    "topic": _split(TOPICS),
    "place": _split(PLACES),
    "person": _split(PEOPLE),
    "role": _split(ROLES),
    "matter": _split(MATTERS),
    "thing": _split(THINGS),
    "pair": _split(PAIRS),
    "sentence": _split(SENTENCES),
    "review": _split(REVIEWS),
    "language": _split(LANGUAGES),
    "count": _split(COUNTS),
    "job": _split(JOBS),
    "line": _split(LINES),
    "buggy": BUGGY,
    "sum_first": [f"{a} boxes hold {b} apples each" for a in (3, 4, 7, 12) for b in (6, 9, 15, 24)],
    "sum_second": [f"{a} more apples lie on the table" for a in (2, 5, 11, 18)],
}


def task(choice: random.Random) -> str:
    """One of TASKS with its slots filled."""
    text = choice.choice(TASKS.splitlines()).replace("\\n", "\n")
    numbers = {"n": choice.randint(2, 60), "m": choice.randint(2, 12), "big": choice.randint(50, 900)}
    for slot, number in numbers.items():
        text = text.replace("{" + slot + "}", str(number))
    for slot, words in SLOTS.items():
        while "{" + slot + "}" in text:
            text = text.replace("{" + slot + "}", choice.choice(words), 1)
    return text


def function(choice: random.Random) -> str:
    """The head of a Python function, with a docstring and examples whose answers are computed."""
    if choice.random() < 0.65:
        argument, kind = choice.choice(NUMBER_NAMES), "list"
        few, which, keep = choice.choice(CHOICES)
        name, what, compute = choice.choice(RESULTS)
        name = f"{name}_of_{few}" if choice.random() < 0.5 else f"{few}_{name}"
        described = f"{which} {what}" if what.startswith("in ") else f"{what} {which}"
        inputs: list[Any] = [[choice.randint(-9, 30) for _ in range(choice.randint(3, 6))] for _ in range(2)]
        examples = [(value, compute(keep(value))) for value in inputs]
    else:
        argument, kind = choice.choice(TEXT_NAMES), "str"
        name, described, apply = choice.choice(TEXT_STEPS)
        texts = [" ".join(choice.sample(WORDS, choice.randint(1, 3))) for _ in range(2)]
        examples = [(value, apply(value)) for value in texts]
    typed = f"{argument}: {kind}" if choice.random() < 0.5 else argument
    shown = examples[: choice.randint(0, 2)]
    lines = "".join(f"    >>> {name}({value!r})\n    {result!r}\n" for value, result in shown)
    begin = choice.choice(("Return", "Compute and return", "Given one argument, return", "Returns"))
    closing = f"\n{lines}    " if shown else ""
    code = f'def {name}({typed}):\n    """{begin} {described}.{closing}"""'
    fenced = f"```python\n{code}\n```" if choice.random() < 0.7 else code
    return f"{choice.choice(INSTRUCTIONS)}\n\n{fenced}"


def requests(count: int, seed: int) -> list[str]:
    """`count` different requests, two fifths of them functions. Raises ValueError where the grammar has no more."""
    choice, found = random.Random(seed), dict[str, None]()
    for _ in range(50 * count):
        if len(found) == count:
            return list(found)
        found[function(choice) if choice.random() < 0.4 else task(choice)] = None
    raise ValueError(f"the grammar gave {len(found)} different requests, expected {count}: ask for fewer.")


def main() -> int:
    """Print them as a prompt file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, metavar="N", help="how many (default: 2000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another seed gives others (default: 1)")
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count is {args.count}, expected 1 or more")
    try:
        found = requests(args.count, args.seed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for number, text in enumerate(found):
        print(json.dumps({"id": f"request/{args.seed}/{number}", "category": "request", "prompt": text}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
