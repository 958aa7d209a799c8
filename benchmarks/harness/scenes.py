"""What each arm is asked in a window: what was served before, the requests, and what of them a cache has to find.

Knows sizes, seed words and the states that a prefix cache can be in. Refuses to know engines and time: how much of what
is stored can be found again it is told. The prompts of two samples, phases, loads or tests share no beginning; the arms
of one sample get the same ones wherever their states say so. Prompts that a cache is to find again are built of parts,
each of which has seed words of its own.

    cold     nothing served before; asked prefix and suffix                    nothing found
    primed   the prefix served before; asked prefix and suffix                 the prefix found
    unseen   the prefix served before; asked another prompt, as long           nothing found
    suffix   the prefix served before; asked the suffix alone                  nothing found
    prefix   nothing served before; asked the prefix alone                     nothing found
    warm     prefix and suffix served before; asked again unchanged            all found but what has to be run
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from benchmarks.harness.arrivals import Arrival
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.serving import Ask
from benchmarks.harness.workload import Workload

STATES = ("cold", "primed", "unseen", "suffix", "prefix", "warm")

Prompt = tuple[int, ...]

Load = Sequence[Arrival]
"""The requests of a window, and when they are due."""

How = Literal["together", "apart", "carried"]
"""Sent when they are due; streamed one after another; so, and each goes on after all ids of those before it."""

Reusable = Callable[[int, int], int | None]
"""Positions stored and tokens of the prompt, to the positions of it that a cache finds again; None: nobody knows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One window of one arm.

    `before` is served to its end, untimed, after everything else was forgotten; None forgets and serves nothing.
    `hits` says, for each request, how many of its tokens have to be found in a cache, None where nobody knows; without
    them all prompts are new.
    """

    asks: tuple[Ask, ...]
    how: How
    before: tuple[Prompt, ...] | None = None
    hits: tuple[int | None, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One load of a test. `name` tells it from the others; `scene` takes an arm, the phase and its run, from 0."""

    name: str
    scene: Callable[[str, str, int], Scene]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Makes the prompts of one test, which is told from every other by its name."""

    test: str
    vocab_size: int

    def __call__(self, num_tokens: int, new_tokens: int, *words: object) -> Prompt:
        workload = Workload(prompt_tokens=num_tokens, new_tokens=new_tokens)
        return workload.prompt(self.vocab_size, self.test, *words)


def arriving(prompts: Prompts, loads: Sequence[Load], *, serves: bool) -> list[Act]:
    """Loads of requests with a prompt each; one alone is streamed, or, with `serves`, sent like any other window."""

    def act(which: int, load: Load) -> Act:
        @_for_all_arms
        def scene(phase: str, number: int) -> Scene:
            asks = []
            for place, each in enumerate(load):
                words = (phase, number, *([which, place] if serves else []))
                prompt = prompts(each.prompt_tokens, each.new_tokens, *words)
                name, end = (_name(phase, number, at) for at in (place, each.after))
                asks.append(Ask(name or "" if serves else "", each.due_s, prompt, each.new_tokens, end))
            return Scene(asks=tuple(asks), how="together" if serves else "apart")

        return Act(name=_told(load), scene=lambda arm, phase, number: scene(phase, number))

    return [act(which, load) for which, load in enumerate(loads)]


def _name(phase: str, number: int, place: int | None) -> str | None:
    return None if place is None else f"{phase}-{number}-{place}"


def reusing(
    prompts: Prompts,
    states: Mapping[str, str],
    reusable: Callable[[str], Reusable],
    *,
    prefix_tokens: Sequence[int],
    suffix_tokens: int,
    new_tokens: int,
) -> list[Act]:
    """A load of one streamed request for each length of the prefix. `states` and `reusable` go by arm.

    Raises InstrumentError for a state that is none of STATES, and for a size that is no number of tokens.
    """
    _check_states(states)
    _check(suffix_tokens=suffix_tokens, new_tokens=new_tokens)

    def act(which: int, length: int) -> Act:
        cast = _Cast.maker(
            prompts, which, size=1, prefix_tokens=length, suffix_tokens=suffix_tokens, new_tokens=new_tokens
        )

        def scene(arm: str, phase: str, number: int) -> Scene:
            return cast(phase, number).scene(states[arm], "apart", reusable(arm))

        return Act(name=f"a prefix of {length}", scene=scene)

    return [act(which, length) for which, length in enumerate(_each(prefix_tokens=prefix_tokens))]


def sharing(
    prompts: Prompts,
    states: Mapping[str, str],
    reusable: Callable[[str], Reusable],
    *,
    sizes: Sequence[int],
    prefix_tokens: int,
    suffix_tokens: int,
) -> list[Act]:
    """A load for each size: so many requests at once, of one prefix and a suffix each, for one token each.

    Of the state "prefix" one request is asked, whatever the size. Raises InstrumentError as `reusing` does.
    """
    _check_states(states)
    _check(prefix_tokens=prefix_tokens, suffix_tokens=suffix_tokens)

    def act(which: int, size: int) -> Act:
        cast = _Cast.maker(
            prompts, which, size=size, prefix_tokens=prefix_tokens, suffix_tokens=suffix_tokens, new_tokens=1
        )

        def scene(arm: str, phase: str, number: int) -> Scene:
            return cast(phase, number).scene(states[arm], "together", reusable(arm))

        return Act(name=f"{size} requests", scene=scene)

    return [act(which, size) for which, size in enumerate(_each(sizes=sizes))]


def conversing(
    prompts: Prompts, reusable: Callable[[str], Reusable], num_turns: int, turn_tokens: int, answer_tokens: int
) -> list[Act]:
    """One conversation: each turn's prompt is everything said so far, its answers too, and `turn_tokens` more.

    A turn finds what the one before it has stored, which is all but its last token. Raises InstrumentError for fewer
    than two turns, and for a size that is no number of tokens.
    """
    _check(turn_tokens=turn_tokens, answer_tokens=answer_tokens)
    if num_turns < 2:
        raise InstrumentError(f"num_turns is {num_turns}: a conversation has at least 2, as the first reuses nothing")
    lengths = [turn * (turn_tokens + answer_tokens) + turn_tokens for turn in range(num_turns)]

    @_for_all_arms
    def said(phase: str, number: int) -> tuple[Ask, ...]:
        new = [prompts(turn_tokens, answer_tokens, phase, number, turn, "turn") for turn in range(num_turns)]
        return _asks(new, answer_tokens, f"{phase}-{number}-load-0")

    def scene(arm: str, phase: str, number: int) -> Scene:
        stored = [before + answer_tokens - 1 for before in lengths[:-1]]
        hits = tuple(reusable(arm)(*each) for each in zip([0, *stored], lengths, strict=True))
        return Scene(asks=said(phase, number), how="carried", before=(), hits=hits)

    return [Act(name=f"{num_turns} turns", scene=scene)]


def revisiting(
    prompts: Prompts,
    predict: Callable[[str, Sequence[Prompt]], Sequence[int]],
    order: Sequence[int],
    prefix_tokens: int,
    suffix_tokens: int,
) -> list[Act]:
    """Requests one after another for one token each: prefix number `order[i]`, and a suffix that nobody else has.

    `predict` says by arm what of each prompt is found. Raises InstrumentError for an order that is empty or holds
    something else than numbers of prefixes, and for a size that is no number of tokens.
    """
    _check(prefix_tokens=prefix_tokens, suffix_tokens=suffix_tokens)
    if not order or not all(type(each) is int and each >= 0 for each in order):
        raise InstrumentError(f"order is {list(order)}: it names at least one prefix, by whole numbers from 0")

    @_for_all_arms
    def asks(phase: str, number: int) -> tuple[Ask, ...]:
        prefixes = {each: prompts(prefix_tokens, 1, phase, number, each, "prefix") for each in set(order)}
        suffixes = [prompts(suffix_tokens, 1, phase, number, place, "suffix") for place in range(len(order))]
        whole = [prefixes[each] + suffix for each, suffix in zip(order, suffixes, strict=True)]
        return _asks(whole, 1, f"{phase}-{number}-load-0")

    def scene(arm: str, phase: str, number: int) -> Scene:
        sent = asks(phase, number)
        hits = tuple(predict(arm, [ask.prompt_ids for ask in sent]))
        return Scene(asks=sent, how="apart", before=(), hits=hits)

    return [Act(name=f"{len(order)} requests", scene=scene)]


_for_all_arms = functools.lru_cache(maxsize=1)
"""What a sample's arms have in common is made once: whoever takes turns with this process is measuring meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Cast:
    """The parts of a window's prompts, whatever state it is in, and the name of its load."""

    name: str
    new_tokens: int
    prefix: Prompt
    suffixes: Sequence[Prompt]
    others: Sequence[Prompt]

    @classmethod
    def maker(
        cls, prompts: Prompts, which: int, *, size: int, prefix_tokens: int, suffix_tokens: int, new_tokens: int
    ) -> "Callable[[str, int], _Cast]":
        def make(num_tokens: int, *words: object) -> Prompt:
            return prompts(num_tokens, new_tokens, *words)

        @_for_all_arms
        def cast(phase: str, number: int) -> "_Cast":
            words = (phase, number, which)
            return cls(
                f"{phase}-{number}-load-{which}",
                new_tokens,
                make(prefix_tokens, *words, "prefix"),
                [make(suffix_tokens, *words, place, "suffix") for place in range(size)],
                [make(prefix_tokens + suffix_tokens, *words, place, "other") for place in range(size)],
            )

        return cast

    def scene(self, state: str, how: How, reusable: Reusable) -> Scene:
        before, asked, num_stored = self._in(state)
        hits = tuple(reusable(num_stored, len(prompt)) for prompt in asked)
        return Scene(asks=_asks(asked, self.new_tokens, self.name), how=how, before=tuple(before), hits=hits)

    def _in(self, state: str) -> tuple[Sequence[Prompt], Sequence[Prompt], int]:
        """What is served before, what is asked, and how many positions that it begins with are stored by then."""
        whole = [self.prefix + suffix for suffix in self.suffixes]
        parts: dict[str, tuple[Sequence[Prompt], Sequence[Prompt], int]] = {
            "cold": ((), whole, 0),
            "primed": ((self.prefix,), whole, len(self.prefix)),
            "unseen": ((self.prefix,), self.others, 0),
            "suffix": ((self.prefix,), self.suffixes, 0),
            "prefix": ((), (self.prefix,), 0),
            "warm": (whole, whole, len(whole[0])),
        }
        return parts[state]


def _asks(asked: Sequence[Prompt], new_tokens: int, name: str) -> tuple[Ask, ...]:
    """Their names tell phase, run, load and place in the window: `sample-3-load-1-place-0`."""
    return tuple(Ask(f"{name}-place-{place}", 0.0, prompt, new_tokens) for place, prompt in enumerate(asked))


def _told(load: Load) -> str:
    return f"a prompt of {load[0].prompt_tokens}" if len(load) == 1 else f"{len(load)} requests"


def _check_states(states: Mapping[str, str]) -> None:
    for arm, state in states.items():
        if state not in STATES:
            raise InstrumentError(f"arm {arm!r} has the state {state!r}; a state is one of: {', '.join(STATES)}")


def _each(**named: Sequence[int]) -> list[int]:
    (name, values), *_ = named.items()
    if not values:
        raise InstrumentError(f"{name} is empty: there is nothing to run")
    for value in values:
        _check(**{name: value})
    return list(values)


def _check(**named: int) -> None:
    for name, value in named.items():
        if type(value) is not int or value < 1:
            raise InstrumentError(f"{name} must be a whole number of at least 1, not {value!r}")
