"""How many KV blocks a pool gets from the memory that is free, and why, in lines that can be checked by hand.

Knows the arithmetic, and how much of a device may be taken. Refuses to know devices and tensors: what is free, and what
the weights take, is the caller's word. All sizes are in bytes.

`auto` takes 90 % of what is left on a GPU, where nothing but the next step's intermediate results competes: vLLM's
`gpu_memory_utilization` leaves the same tenth. It takes 40 % on a CPU, whose memory is everybody's. It always leaves
what a step needs, which on a small GPU is more than a tenth. No pool is larger than its requests could ever fill.
"""

import dataclasses
import re
from fractions import Fraction

from nanoserve.config import ModelConfig, SchedulerConfig
from nanoserve.errors import ConfigError

AUTO_SHARES = {"cuda": Fraction(90, 100), "cpu": Fraction(40, 100)}
"""Of the memory that is left beside the weights, by the kind of device."""

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*|%)")
_FORMS = "auto, bytes (800000000), a size (512MiB, 2GiB, 1.5GB) or a share of the free memory up to 100% (40%)"
_MAX_STEP_TOKENS = SchedulerConfig().max_step_tokens


def parse_kv_memory(text: str) -> int | Fraction | None:
    """None for `auto`, an int for bytes, a Fraction above 0 and up to 1 for a share of the free memory.

    Raises ConfigError for anything else, with the forms there are. Units may be in either case; a part of a byte is
    dropped.
    """
    if text == "auto":
        return None
    match = _AMOUNT.fullmatch(str(text))
    amount, unit = (Fraction(match[1]), match[2].lower()) if match else (Fraction(0), "")
    if unit == "%" and 0 < amount <= 100:
        return amount / 100
    num_bytes = int(amount * _UNITS.get(unit, 0))
    if not num_bytes:
        raise ConfigError(f"kv_memory must be {_FORMS}, not {text!r}")
    return num_bytes


def step_bytes(config: ModelConfig, bytes_per_number: int, max_step_tokens: int) -> int:
    """What the intermediate results of a step's positions take at their widest, in the MLP.

    For each position: the layer's input, the residual and its norm; gate, up and their product; the rotary tables.
    Attention is not in it: what it takes depends on its kernel.
    """
    per_token = 3 * (config.hidden_size + config.intermediate_size) + 2 * config.head_dim
    return max_step_tokens * per_token * bytes_per_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool's size, and all that it follows from; `str()` shows the arithmetic.

    `left_bytes` are free and not taken by the weights, `budget_bytes` what `kv_memory` makes of them.
    """

    config: ModelConfig
    bytes_per_number: int
    block_size: int
    max_running: int
    keeps_prefixes: bool
    device_kind: str
    free_bytes: int
    weights_bytes: int
    kv_memory: str
    step_bytes: int
    budget_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.free_bytes - self.weights_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.config.kv_bytes_per_token(self.bytes_per_number)

    @property
    def blocks_per_request(self) -> int:
        """For a request at the model's longest context."""
        return -(-self.config.max_context_tokens // self.block_size)

    @property
    def num_held_blocks(self) -> int:
        """Running requests hold no more: as many as may run, each at the model's longest context."""
        return self.max_running * self.blocks_per_request

    @property
    def num_usable_blocks(self) -> int:
        """A larger pool would not be used: what requests hold, and as many blocks again to keep prefixes in."""
        return self.num_held_blocks * (2 if self.keeps_prefixes else 1)

    @property
    def num_blocks(self) -> int:
        return min(self.budget_bytes // self.bytes_per_block, self.num_usable_blocks)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def gather_bytes(self) -> int:
        """What reading requests together takes where no kernel follows block tables: a layer of theirs, and spare."""
        held = min(self.num_blocks, self.num_held_blocks) * self.bytes_per_block
        return 0 if self.device_kind == "cuda" else held // self.config.num_layers * 9 // 8

    @property
    def peak_bytes(self) -> int:
        """The pool when it is full, and the widest step beside it."""
        return self.num_bytes + self.step_bytes + self.gather_bytes

    @property
    def num_tokens(self) -> int:
        """Positions that the pool stores."""
        return self.num_blocks * self.block_size

    @property
    def longest_request_tokens(self) -> int:
        """Of one request that has the pool to itself, prompt and answer; its last token is never stored."""
        return min(self.num_tokens + 1, self.config.max_context_tokens)

    def __str__(self) -> str:
        return "\n".join(f"{name:12} {text}" for name, text in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        of, per_block, usable = self.config, self.bytes_per_block, self.num_usable_blocks
        per_token = of.kv_bytes_per_token(self.bytes_per_number)
        weights = f"{in_words(self.weights_bytes)} yet to be loaded; {in_words(self.left_bytes)} are left"
        return [
            (
                "per token",
                f"2 (keys, values) x {of.num_layers} layers x {of.num_kv_heads} KV heads x {of.head_dim} numbers "
                f"x {self.bytes_per_number} bytes = {per_token:,} bytes",
            ),
            ("per block", f"{self.block_size:,} tokens x {per_token:,} bytes = {in_words(per_block)}"),
            ("free", f"{in_words(self.free_bytes)} on {self.device_kind}"),
            *([("weights", weights)] if self.weights_bytes else []),
            ("budget", self._budget_in_words()),
            (
                "at most",
                f"{self.max_running:,} requests x {self.blocks_per_request:,} blocks "
                f"({of.max_context_tokens:,} tokens, the longest context)"
                f"{' x 2, for prefixes that nobody holds' if self.keeps_prefixes else ''} "
                f"= {in_words(usable * per_block)}",
            ),
            ("KV pool", f"{self.num_blocks:,} blocks x {per_block:,} bytes = {in_words(self.num_bytes)}"),
            ("holds", self._room_in_words()),
            ("peak", f"{in_words(self.peak_bytes)} with the pool full and the intermediate results of a step"),
        ]

    def _budget_in_words(self) -> str:
        """How the budget came about."""
        words, left = in_words(self.budget_bytes), "what is left" if self.weights_bytes else "what is free"
        if self.kv_memory != "auto":
            return f"{self.kv_memory}{f' of {left}' if '%' in self.kv_memory else ''} = {words}"
        if self.budget_bytes == self.left_bytes - self.step_bytes:
            return f"auto: {left} - {in_words(self.step_bytes)} for a step's intermediate results = {words}"
        return f"auto: {float(100 * AUTO_SHARES[self.device_kind]):g} % of {left} = {words}"

    def _room_in_words(self) -> str:
        """In tokens, and in requests: how many of the longest, or else how long the longest may be."""
        if self.num_blocks < self.blocks_per_request:
            longest = f"{self.longest_request_tokens:,} of the model's {self.config.max_context_tokens:,}"
            return f"{self.num_tokens:,} tokens; a request may have {longest}, prompt and answer"
        num_requests = self.num_blocks // self.blocks_per_request
        return f"{self.num_tokens:,} tokens: {num_requests:,} x the longest context, or more and shorter requests"


def plan_pool(
    config: ModelConfig,
    *,
    bytes_per_number: int,
    block_size: int,
    max_running: int,
    free_bytes: int,
    kv_memory: str,
    device_kind: str,
    keeps_prefixes: bool = False,
    weights_bytes: int = 0,
    max_step_tokens: int = _MAX_STEP_TOKENS,
) -> PoolPlan:
    """Size the pool; `kv_memory` is what `parse_kv_memory` takes, `device_kind` a key of AUTO_SHARES.

    `weights_bytes` are those that are still to be loaded into what is free. Raises ConfigError where `kv_memory` is
    malformed, is more than is left, or comes to less than one block.
    """
    needed = step_bytes(config, bytes_per_number, max_step_tokens)
    plan = PoolPlan(
        config=config,
        bytes_per_number=bytes_per_number,
        block_size=block_size,
        max_running=max_running,
        keeps_prefixes=keeps_prefixes,
        device_kind=device_kind,
        free_bytes=free_bytes,
        weights_bytes=weights_bytes,
        kv_memory=kv_memory,
        step_bytes=needed,
        budget_bytes=_budget_bytes(kv_memory, free_bytes, weights_bytes, needed, AUTO_SHARES[device_kind]),
    )
    _refuse_none(plan)
    return plan


def _budget_bytes(kv_memory: str, free_bytes: int, weights_bytes: int, step: int, auto_share: Fraction) -> int:
    asked, left = parse_kv_memory(kv_memory), free_bytes - weights_bytes
    if left <= 0:
        raise ConfigError(
            f"no memory is left for KV blocks: {in_words(free_bytes)} are free, the weights take "
            f"{in_words(weights_bytes)}"
        )
    if asked is None:
        return max(0, min(int(auto_share * left), left - step))
    if isinstance(asked, Fraction):
        return int(asked * left)
    if asked > left:
        beside = f" beside {in_words(weights_bytes)} of weights" if weights_bytes else ""
        raise ConfigError(
            f"kv_memory {kv_memory!r} is {in_words(asked)}, more than the {in_words(left)} that are free{beside}"
        )
    return asked


def _refuse_none(plan: PoolPlan) -> None:
    if not plan.num_blocks:
        raise ConfigError(
            f"kv_memory {plan.kv_memory!r} comes to {in_words(plan.budget_bytes)}, less than one block of "
            f"{plan.block_size} tokens: {in_words(plan.bytes_per_block)}"
        )


def in_words(num_bytes: int) -> str:
    """Exact bytes, and from 1 KiB on the largest binary unit as well."""
    power = min(max(0, (num_bytes.bit_length() - 1) // 10), 4)
    in_units = f" ({num_bytes / 1024**power:.2f} {'KMGT'[power - 1]}iB)" if power else ""
    return f"{num_bytes:,} bytes{in_units}"
