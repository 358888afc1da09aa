"""Word lists, made-up words, and the split that keeps held-out material out of training."""

from __future__ import annotations

import hashlib
from random import Random

WORDS: tuple[str, ...] = tuple(
    """
    apple anchor arrow autumn bakery balloon basket beach bicycle blanket bottle branch bread bridge
    bright brother bucket butter button cabin camera candle canvas carbon carpet castle cellar cheese
    cherry circle clever cloud coffee copper corner cotton cradle crystal curtain daisy dancer danger
    desert diamond dinner doctor dolphin donkey dragon drawer dream eagle early earth easel echo elbow
    ember engine evening fabric falcon farmer feather fiddle finger flower forest fortune fossil friend
    frozen funnel galaxy garden garlic gentle ginger giraffe glacier golden grape gravel guitar hammer
    harbor harvest hazel helmet hollow honest honey horizon hunter island ivory jacket jelly jewel
    journey jungle kernel kettle kitchen kitten ladder lantern laurel lemon letter library lizard
    locket lumber magnet mango maple marble market meadow mellow memory mirror modern monkey morning
    mountain muffin museum music napkin narrow nature needle nephew nickel night north notebook number
    oasis ocean olive onion orange orchard otter oyster paddle palace panda paper parrot pebble pencil
    pepper petal piano picnic pillow pirate planet plaster pocket poem polite potato prairie pumpkin
    puppet purple puzzle quartz queen quick quiet rabbit radish raven ribbon river robin rocket rubber
    saddle sailor salmon sandal school season secret shadow shelter silver simple sister sketch smooth
    snow soldier spider spirit spring square stable station stone storm summer sunset sweater table
    tailor teapot temple thunder ticket tiger timber tomato travel treasure tunnel turtle umbrella
    uncle valley velvet village violet violin wagon walnut water whale wheat whisper willow window
    winter wisdom wonder yellow zebra zipper cup dog cat hat map pen sun tree fish bird ship rope
    lamp ring sand song star wind wolf wool yarn road rain moon leaf lake king iron hill gold goat
    frog fork door desk cave book boat bell bear
    """.split()
)

CITIES: tuple[str, ...] = tuple(
    """
    Paris Rome Berlin Madrid London Vienna Prague Lisbon Dublin Oslo Helsinki Stockholm Warsaw Athens
    Budapest Zurich Geneva Milan Naples Turin Munich Hamburg Cologne Lyon Nice Porto Seville Valencia
    Boston Chicago Denver Dallas Seattle Portland Austin Miami Toronto Montreal Vancouver Tokyo Osaka
    Kyoto Seoul Beijing Shanghai Mumbai Delhi Bangkok Hanoi Jakarta Manila Sydney Melbourne Perth
    Auckland Cairo Nairobi Lagos Tunis Lima Quito Bogota Santiago Havana
    """.split()
)

NAMES: tuple[str, ...] = tuple(
    """
    Anna Ben Clara David Emma Felix Greta Hugo Iris Jonas Katya Leo Maria Noah Olga Peter Quinn Rosa
    Samir Tara Umar Vera Walter Xenia Yusuf Zoe Alice Bruno Carla Dora Elias Fatima George Helen Igor
    Julia Karl Laura Marco Nina Oscar Paula Rita Simon Tom Ursula Victor Wanda Adam Bella Chen Diana
    """.split()
)

JOBS: tuple[str, ...] = tuple(
    "teacher doctor baker farmer painter lawyer pilot nurse writer singer cook tailor driver".split()
)
ITEMS: tuple[str, ...] = tuple(
    "apples books chairs lamps pens cups tickets shirts candles bottles plates baskets keys maps".split()
)
LANGUAGES: tuple[str, ...] = tuple(
    "French German Spanish Italian Dutch Polish Greek Turkish Japanese Korean Arabic Hindi".split()
)

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr pl pr sh st tr".split()
_VOWELS = "a e i o u a e i o ea ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "nd", "rk"]


def held_out(*key: object) -> bool:
    """Whether the item named by ``key`` belongs to the held-out tenth that training never sees."""
    text = "|".join(str(part) for part in key)
    return hashlib.sha256(text.encode()).digest()[0] % 10 == 0


# Hashes of four-letter pieces that no made-up word may contain, because they would offend.
_REFUSED = frozenset(
    """
    0f066c9b 13a465fc 1bae8f89 2a6937d7 34b14e32 40582c4d 566f532d 59cc3cb8 6ac3c336
    6f58ce49 70aafb42 7bc67115 85fc17f7 8c5c0439 afc41e6f b1106bd2 c2c3b68b
    """.split()
)


def _offends(word: str) -> bool:
    pieces = (word[i : i + 4] for i in range(len(word) - 3))
    return any(hashlib.sha256(piece.encode()).hexdigest()[:8] in _REFUSED for piece in pieces)


class Source:
    """A seeded source of words and values from one side of the split.

    Args:
        rng: the random generator that decides everything.
        held: ``True`` draws held-out material, ``False`` training material.
    """

    def __init__(self, rng: Random, held: bool = False) -> None:
        self.rng = rng
        self.held = held

    def pick(self, options: tuple[str, ...] | list[str], kind: str) -> str:
        """One option on this side of the split; ``kind`` separates lists with the same words."""
        while True:
            option = self.rng.choice(options)
            if held_out(kind, option) == self.held:
                return option

    def made_up(self) -> str:
        """A pronounceable word that means nothing, 3 to 9 letters, from this side of the split."""
        while True:
            parts = [self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) for _ in range(self.rng.randint(1, 3))]
            word = "".join(parts) + self.rng.choice(_CODAS)
            if 3 <= len(word) <= 9 and held_out("word", word) == self.held and not _offends(word):
                return word

    def word(self) -> str:
        """A lower-case word; only made-up ones are ever held out, for a listed word may be a token of its own."""
        return self.made_up() if self.held or self.rng.random() < 0.5 else self.rng.choice(WORDS)

    def city(self) -> str:
        """A place name, real or made up."""
        return self.pick(CITIES, "city") if self.rng.random() < 0.5 else self.made_up().capitalize()

    def name(self) -> str:
        """A first name, real or made up."""
        return self.pick(NAMES, "name") if self.rng.random() < 0.6 else self.made_up().capitalize()

    def phrase(self) -> str:
        """Two to four lower-case words, for titles and messages."""
        return " ".join(self.word() for _ in range(self.rng.randint(2, 4)))

    def integer(self, low: int = 1, high: int = 999) -> int:
        """A whole number, half of the time small, from this side of the split above 99."""
        while True:
            value = self.rng.randint(low, min(high, 60)) if self.rng.random() < 0.5 else self.rng.randint(low, high)
            if value < 100 or held_out("integer", value) == self.held:
                return value

    def date(self) -> str:
        """A date as YYYY-MM-DD."""
        while True:
            r = self.rng
            date = f"20{r.randint(20, 39)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"
            if held_out("date", date) == self.held:
                return date

    def time(self) -> str:
        """A time of day as HH:MM."""
        while True:
            time = f"{self.rng.randint(0, 23):02d}:{self.rng.randrange(0, 60, 5):02d}"
            if held_out("time", time) == self.held:
                return time

    def code(self) -> str:
        """An order or ticket code such as KD482."""
        while True:
            letters = "".join(self.rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
            code = f"{letters}{self.rng.randint(100, 9999)}"
            if held_out("code", code) == self.held:
                return code

    def email(self) -> str:
        """An address at a reserved example domain."""
        domain = self.rng.choice(["example.com", "example.org", "example.net"])
        return f"{self.name().lower()}@{domain}"
