"""The languages that Whisper knows: code -> English name (Radford et al. 2022, table 11)."""

from __future__ import annotations

from quire_interfaces import wrong_value

__all__ = ["LANGUAGES", "language_code"]

_NAMES = """
en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese, pt portuguese, tr turkish,
pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian, id indonesian, hi hindi, fi finnish, vi vietnamese,
he hebrew, uk ukrainian, el greek, ms malay, cs czech, ro romanian, da danish, hu hungarian, ta tamil, no norwegian,
th thai, ur urdu, hr croatian, bg bulgarian, lt lithuanian, la latin, mi maori, ml malayalam, cy welsh, sk slovak,
te telugu, fa persian, lv latvian, bn bengali, sr serbian, az azerbaijani, sl slovenian, kn kannada, et estonian,
mk macedonian, br breton, eu basque, is icelandic, hy armenian, ne nepali, mn mongolian, bs bosnian, kk kazakh,
sq albanian, sw swahili, gl galician, mr marathi, pa punjabi, si sinhala, km khmer, sn shona, yo yoruba, so somali,
af afrikaans, oc occitan, ka georgian, be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao,
uz uzbek, fo faroese, ht haitian creole, ps pashto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit, lb luxembourgish,
my myanmar, bo tibetan, tl tagalog, mg malagasy, as assamese, tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir,
jw javanese, su sundanese, yue cantonese
"""
LANGUAGES: dict[str, str] = dict(each.strip().split(" ", 1) for each in _NAMES.split(",") if each.strip())
_CODES = {name: code for code, name in LANGUAGES.items()} | {
    "burmese": "my",
    "valencian": "ca",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "pushto": "ps",
    "panjabi": "pa",
    "moldavian": "ro",
    "moldovan": "ro",
    "sinhalese": "si",
    "castilian": "es",
    "mandarin": "zh",
}
"""English name -> code; languages have several names."""


def language_code(language: str, param: str = "language") -> str:
    """The code of a language that is named by it or by its English name, in any case; of a name with a region (`en-US`)
    the language counts.

    Args:
        param: Field of the request.

    Raises:
        RequestError: no such language.
    """
    name = language.strip().lower()
    for found in (name, name.replace("_", "-").split("-")[0]):
        if found in LANGUAGES:
            return found
        if found in _CODES:
            return _CODES[found]
    raise wrong_value(param, language, f"be a code or an English name of one of {len(LANGUAGES)} languages")
