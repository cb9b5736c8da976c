"""Dates as people write them in English, French and German.

Ambiguous dates are settled so, and the model learns them so:
* `03/04/2010` is day first, 3 April; month first only if the second number is above 12.
* A number of four digits in front is the year: `2010-04-03`, `2010 april 3`.
* Two-digit years 00 to 68 are 2000 to 2068, 69 to 99 are 1969 to 1999, as POSIX reads `%y`.
* A weekday says nothing: it is copied by no one and need not agree with the date.
"""

from __future__ import annotations

import calendar
import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_TWO_DIGIT_YEAR = 1969  # two digits cover this year and the 99 that follow


@dataclass(frozen=True)
class Language:
    """Words of a language; months and weekdays as lists of spellings, the usual one first."""

    months: tuple[tuple[str, ...], ...]
    weekdays: tuple[tuple[str, ...], ...]
    spoken: Callable[[random.Random, datetime.date, Language], str]  # day, month and year in words


def write_date(rng: random.Random, date: datetime.date) -> str:
    """Return one of the many ways to write `date`."""
    language = rng.choices((_ENGLISH, _FRENCH, _GERMAN), weights=(5, 3, 3))[0]
    text = _numeric(rng, date) if rng.random() < 0.25 else language.spoken(rng, date, language)
    return _with_noise(rng, text)


def draw_date(rng: random.Random) -> datetime.date:
    """Return a date, most often of a year that people write about."""
    first, last = rng.choices(
        ((1930, 2049), (1800, 2199), (1000, 2999)), weights=(0.58, 0.26, 0.16)
    )[0]
    year = rng.randint(first, last)
    month = rng.randint(1, 12)
    return datetime.date(year, month, rng.randint(1, calendar.monthrange(year, month)[1]))


def _numeric(rng: random.Random, date: datetime.date) -> str:
    style = rng.random()
    day, month = _number(rng, date.day), _number(rng, date.month)
    if style < 0.30:
        separator = rng.choice(("-", "-", "-", "/", ".", " "))
        text = f"{date.year:04}{separator}{month}{separator}{day}"
    elif style < 0.39:
        text = f"{date:%Y%m%d}"
    else:
        separator = rng.choice(("/", "/", ".", ".", "-", " ", ". ", " / "))
        if date.day > 12 and rng.random() < 0.3:
            day, month = month, day
        text = f"{day}{separator}{month}{separator}{_year(rng, date.year, in_words=False)}"
    if rng.random() < 0.12:
        text = (
            _weekday(rng, rng.choice((_ENGLISH, _FRENCH, _GERMAN))) + rng.choice((" ", ", ")) + text
        )
    return text


def _english(rng: random.Random, date: datetime.date, language: Language) -> str:
    month, year = _month(rng, date.month, language), _year(rng, date.year)
    day = _english_day(rng, date.day)
    comma = rng.choice((",", ",", ""))
    style = rng.random()
    if style < 0.40:  # 3rd of Feb, 1998
        of = " of" if rng.random() < 0.35 else ""
        text = f"{day}{of} {month}{comma if rng.random() < 0.5 else ''} {year}"
        if rng.random() < 0.12:
            text = "the " + text
    elif style < 0.78:  # May 5th, '98
        the = "the " if rng.random() < 0.08 else ""
        text = f"{month} {the}{day}{comma} {year}"
    else:
        text = _joined(rng, date, month, year)
    return _with_weekday(rng, text, language, prefixes=("on ", "the ", "date: "))


def _french(rng: random.Random, date: datetime.date, language: Language) -> str:
    day = str(date.day)
    if date.day == 1 and rng.random() < 0.8:
        day = rng.choice(("1er", "1er", "1er", "premier"))
    text = f"{day} {_month(rng, date.month, language)} {_year(rng, date.year)}"
    if rng.random() < 0.06:
        text = _joined(rng, date, _month(rng, date.month, language), _year(rng, date.year))
    return _with_weekday(rng, text, language, prefixes=("le ", "le ", "le ", "du ", "au "))


def _german(rng: random.Random, date: datetime.date, language: Language) -> str:
    day = _number(rng, date.day) + rng.choice((".", ".", ".", ".", ""))
    if rng.random() < 0.06:
        day = _GERMAN_ORDINALS[date.day - 1] + rng.choice(("r", "n"))
    text = f"{day} {_month(rng, date.month, language)} {_year(rng, date.year)}"
    if rng.random() < 0.06:
        text = _joined(rng, date, _month(rng, date.month, language), _year(rng, date.year))
    return _with_weekday(rng, text, language, prefixes=("der ", "am ", "den ", "vom ", "dem "))


def _joined(rng: random.Random, date: datetime.date, month: str, year: str) -> str:
    """Return a form without grammar: 25-dec-2020, 25dec2020, 2020 december 25."""
    day = _number(rng, date.day)
    separator = rng.choice(("-", "/", ".", "", " ", ", "))
    order = rng.random()
    if order < 0.5:
        return f"{day}{separator}{month.rstrip('.')}{separator}{year}"
    if order < 0.85:
        return f"{date.year:04}{separator}{month.rstrip('.')}{separator}{day}"
    return f"{month.rstrip('.')}{separator or '-'}{day}{separator or '-'}{year}"


def _with_weekday(
    rng: random.Random, text: str, language: Language, *, prefixes: tuple[str, ...]
) -> str:
    """Put a weekday, a short word, or both, around the date."""
    prefix = rng.choice(prefixes)
    style = rng.random()
    if style < 0.50:
        return text
    if style < 0.68:
        return prefix + text
    weekday = _weekday(rng, language)
    if style < 0.86:
        return f"{weekday}{rng.choice((' ', ' ', ', ', ','))}{text}"
    if style < 0.94:
        return f"{weekday}{rng.choice((' ', ', '))}{prefix}{text}"
    if style < 0.98:
        return f"{prefix}{weekday}{rng.choice((' ', ', '))}{text}"
    return f"{text}{rng.choice((' ', ', '))}{rng.choice((weekday, f'({weekday})'))}"


def _weekday(rng: random.Random, language: Language) -> str:
    return rng.choice(rng.choice(language.weekdays))


def _month(rng: random.Random, month: int, language: Language) -> str:
    name, *short = language.months[month - 1]
    if short and rng.random() < 0.45:
        return rng.choice(short)
    if len(name) > 5 and rng.random() < 0.05:
        return _misspelt(rng, name)
    return name


def _misspelt(rng: random.Random, word: str) -> str:
    """Return a long word with a letter lost, doubled or swapped, the first and last kept."""
    i = rng.randrange(1, len(word) - 2)
    slip = rng.randrange(3)
    if slip == 0:
        return word[:i] + word[i + 1 :]
    if slip == 1:
        return word[:i] + word[i] + word[i:]
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def _year(rng: random.Random, year: int, *, in_words: bool = True) -> str:
    short_enough = FIRST_TWO_DIGIT_YEAR <= year < FIRST_TWO_DIGIT_YEAR + 100
    if not short_enough or rng.random() < (0.82 if in_words else 0.65):
        return f"{year:04}"
    return (rng.choice(("'", "'", "’", "")) if in_words else "") + f"{year % 100:02}"


def _number(rng: random.Random, number: int) -> str:
    return f"{number:02}" if rng.random() < 0.4 else str(number)


def _english_day(rng: random.Random, day: int) -> str:
    style = rng.random()
    if style < 0.45:
        return str(day)
    if style < 0.52:
        return f"{day:02}"
    if style < 0.59:
        return _ENGLISH_ORDINALS[day - 1].replace("-", rng.choice(("-", " ")))
    suffix = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{rng.choice(('', '', '', '', ' '))}{suffix}"


def _with_noise(rng: random.Random, text: str) -> str:
    """Return the text in some case, with stops and spaces lost, added and moved."""
    text = rng.choice((str, str, str.lower, str.lower, str.upper, str.title))(text)
    if rng.random() < 0.06:
        text = text.replace(",", rng.choice(("", " ,", ".", ";")))
    if rng.random() < 0.04:
        text = text.replace(". ", rng.choice((" ", ".")))
    if rng.random() < 0.05:
        text = text.replace(" ", "  ", 1)
    if rng.random() < 0.06:
        text = rng.choice((" {}", "{} ", "{}.", "{}!", "{}?", "{},", "({})", '"{}"')).format(text)
    return text


def _spellings(table: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split()) for line in table.strip().splitlines())


_ENGLISH = Language(
    months=_spellings("""
        January Jan Jan.
        February Feb Feb. Febr.
        March Mar Mar.
        April Apr Apr.
        May
        June Jun Jun.
        July Jul Jul.
        August Aug Aug.
        September Sep Sept Sep. Sept.
        October Oct Oct.
        November Nov Nov.
        December Dec Dec.
    """),
    weekdays=_spellings("""
        Monday Mon Mon.
        Tuesday Tue Tues Tue.
        Wednesday Wed Wed. Weds
        Thursday Thu Thur Thurs Thu.
        Friday Fri Fri.
        Saturday Sat Sat.
        Sunday Sun Sun.
    """),
    spoken=_english,
)

_FRENCH = Language(
    months=_spellings("""
        janvier janv. janv jan.
        février févr. févr fév. fév
        mars
        avril avr. avr
        mai
        juin
        juillet juil. juil
        août
        septembre sept. sept
        octobre oct. oct
        novembre nov. nov
        décembre déc. déc
    """),
    weekdays=_spellings("""
        lundi lun. lun
        mardi mar. mar
        mercredi mer. mer
        jeudi jeu. jeu
        vendredi ven. ven
        samedi sam. sam
        dimanche dim. dim
    """),
    spoken=_french,
)

_GERMAN = Language(
    months=_spellings("""
        Januar Jan. Jan Jänner
        Februar Feb. Feb Febr.
        März Mrz. Mrz Maerz
        April Apr. Apr
        Mai
        Juni Jun. Jun
        Juli Jul. Jul
        August Aug. Aug
        September Sept. Sept Sep.
        Oktober Okt. Okt
        November Nov. Nov
        Dezember Dez. Dez
    """),
    weekdays=_spellings("""
        Montag Mo. Mo
        Dienstag Di. Di
        Mittwoch Mi. Mi
        Donnerstag Do. Do
        Freitag Fr. Fr
        Samstag Sa. Sa Sonnabend
        Sonntag So. So
    """),
    spoken=_german,
)

_ENGLISH_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first "
    "twenty-second twenty-third twenty-fourth twenty-fifth twenty-sixth twenty-seventh "
    "twenty-eighth twenty-ninth thirtieth thirty-first"
).split()
_GERMAN_ORDINALS = (
    "erste zweite dritte vierte fünfte sechste siebte achte neunte zehnte elfte zwölfte "
    "dreizehnte vierzehnte fünfzehnte sechzehnte siebzehnte achtzehnte neunzehnte zwanzigste "
    "einundzwanzigste zweiundzwanzigste dreiundzwanzigste vierundzwanzigste fünfundzwanzigste "
    "sechsundzwanzigste siebenundzwanzigste achtundzwanzigste neunundzwanzigste dreißigste "
    "einunddreißigste"
).split()
