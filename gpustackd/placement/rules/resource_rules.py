"""What a search must hold for one demand: the engine's flags and the estimate, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, TypedDict

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.gguf_levels import LevelSizes
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.pools import Accelerator, DeviceGroup, GpuPool
from gpustackd.engines.flags import COLUMN
from gpustackd.engines.parallelism import Divisors, WorldSize
from gpustackd.engines.vllm import ParallelSizes
from gpustackd.errors import BadRow

NO_DIVISORS = Divisors()


class ClaimPolicy(Enum):
    """How the memory booked on one card follows from the need V."""

    SHARE = "share"
    """A fixed share of the card, whatever the model needs: int(total * share)."""
    SPLIT = "split"
    """The need, split evenly over the cards of the instance."""
    AT_LEAST = "at_least"
    """The split, but no less than a fixed share of the card where the engine's flag says so."""
    EACH = "each"
    """The whole need on every card (image models)."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufRules:
    """What is asked beside the sizes. `layers` None = as many as fit; 0 = none."""

    sizes: LevelSizes
    total: int
    layers: int | None
    split: tuple[float, ...]
    cpu_offloading: bool
    image: bool
    sized_for: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        """Whether a place for all layers is looked for."""
        return self.layers is None or self.layers == self.total

    @property
    def partial(self) -> bool:
        """Whether a place for some layers is."""
        return self.cpu_offloading and not self.image and self.layers not in (0, self.total)

    @property
    def host_only(self) -> bool:
        """Whether a place without a GPU is."""
        return self.cpu_offloading and not self.image and self.layers in (None, 0)


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Of which pool, and how much of a card."""

    type: str
    profile: str = ""
    memory: float = 0
    """Percentage of a card's memory; 0 = all of it."""
    cores: float = 0
    cards: int = 1
    """Cards, or parts of cards, of one worker."""
    world: int = 0
    """Parts that the engine's own flags ask for; 0 = they do not say."""
    backend: Engine = Engine.CUSTOM

    @property
    def whole(self) -> bool:
        """Whether cards are taken whole."""
        return not self.profile and not self.memory

    def size(self, pool: GpuPool) -> int:
        """Bytes of one part; 0 where the pool does not say."""
        if self.profile:
            return pool.profiles.get(self.profile) or 0
        card = pool.memory or 0
        return int(card * self.memory / 100) if self.memory else card

    def allowed(self, group: DeviceGroup) -> bool:
        """Whether a node's cards can be shared in this way."""
        if self.profile:
            return group.physical_count > 0 and self.profile in group.profiles
        return self.whole or group.logical_count > 0

    def free(self, card: Accelerator, pool: GpuPool) -> bool:
        """Whether enough of the card remains by the cluster's own count."""
        if self.whole:
            return card.remaining >= card.full
        share = self.memory / 100
        if self.profile:
            share = self.size(pool) / pool.memory if pool.memory else 0.0
        return card.remaining > 0 and card.remaining >= share * card.full


@dataclass(frozen=True, slots=True)
class ResourceRules:
    """Sizes in bytes. `share` is the part of a card's memory that the engine takes."""

    engine: Engine
    vram: int
    claim_policy: ClaimPolicy
    share: float = 0.0
    share_of_type: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Memory fraction per GPU type where the engine derives it from the cards."""
    share_flag: str = ""
    ram: int = 0
    """RAM that a worker must have free before it is looked at."""
    ram_static: int | None = None
    ram_ratio: float | None = None
    gpu_count: int = 0
    """Exactly so many GPUs; 0 = as few as hold the model."""
    fixed_world: bool = False
    """The flags name the parallel sizes: divisibility concerns the tensor-parallel size alone."""
    divisors: Divisors = NO_DIVISORS
    distributed: bool = False
    fewest: bool = True
    """Of placements on one worker only those with the fewest GPUs count."""
    spans: bool = True
    """Whether an instance may lie on several workers at all."""
    cpu: bool = False
    """Whether a place without a GPU is looked at last."""
    cpu_only: bool = False
    topology: ParallelSizes | None = None
    """Sizes that the layout over workers is checked against (executor `mp`)."""
    grouped: bool = False
    """Cards of a placement have about the same free memory (SGLang)."""
    per_worker: int = 0
    """GPUs that each of several workers gives, where the parallel sizes fix it (MindIE)."""
    kinds: frozenset[str] = frozenset()
    """GPU types that an engine's own selectors look at (MindIE)."""
    pool: PoolRequest | None = None
    """What is asked of a pool of cards."""
    gguf: GgufRules | None = None
    """Sizes of a GGUF model by layers on GPUs, and what its flags ask."""
    addresses: bool = False
    """Whether the GPUs' network addresses belong to the placement (MindIE)."""
    unchanged: bool = False
    """Commit only where the rows are as the decision saw them (whole cards)."""
    mode: str | None = None
    devices: Callable[[Fleet, Ints], Bools | None] | None = None
    """(R, S) cards of some worker positions that the engine runs on, None = all; not set = it runs on any."""
    by_cpu: Callable[[Fleet, Ints], Bools] | None = None
    """(R,) positions where the engine runs without an accelerator; not set = anywhere."""
    replicas: int = 1

    def memory_fraction(self, gpu_type: str) -> float:
        """Part of a card of this GPU type that the engine takes, 0 to 1."""
        return self.share_of_type.get(gpu_type, self.share)

    def claim(self, total: int, gpu_type: str, count: int) -> int:
        """Bytes booked on one card of `total` bytes where `count` cards share the model."""
        if self.claim_policy is ClaimPolicy.EACH:
            return self.vram
        fraction = self.memory_fraction(gpu_type)
        if self.claim_policy is ClaimPolicy.SHARE:
            return int(total * fraction)
        part = -(-self.vram // count)
        return max(part, int(total * fraction)) if self.claim_policy is ClaimPolicy.AT_LEAST else part

    def ram_claim(self, vram: int) -> int:
        """RAM to book on a worker where `vram` is booked."""
        if self.ram_static:
            return self.ram_static
        return int(vram * self.ram_ratio) if self.ram_ratio and vram else 0

    @property
    def largest_fraction(self) -> float:
        """The largest part of a card that may be booked, where it is the same for all; else 1."""
        fixed = self.claim_policy is ClaimPolicy.SHARE and not self.share_of_type
        return self.share if fixed else 1.0

    @property
    def ram_floor(self) -> int:
        """RAM that any worker of the placement needs free, whatever VRAM is booked there."""
        return max(self.ram, self.ram_static or 0)


class DemandFields(TypedDict):
    """Fields of the rules that every demand states alike."""

    engine: Engine
    vram: int
    ram: int
    ram_static: int | None
    ram_ratio: float | None
    replicas: int


def demand_fields(demand: Demand) -> DemandFields:
    """Bytes of VRAM and RAM that the demand needs, and its number of replicas."""
    need, replicas = demand.need, demand.spec.replicas
    return {
        "engine": demand.engine,
        "vram": need.vram or 0,
        "ram": need.ram,
        "ram_static": need.ram_static,
        "ram_ratio": need.ram_ratio,
        "replicas": 1 if replicas is None else replicas,
    }


def divisors(demand: Demand, vision: bool) -> Divisors:
    """Quantities known of the model; the vision part only where the engine splits it."""
    hyper = demand.facts.hyper
    if hyper is None:
        return Divisors()
    return Divisors(
        hyper.num_attention_heads or 0, (hyper.vision_heads or 0) if vision else 0, hyper.vocab_size or 0
    )


def check_split(divides: Divisors, flag: str, tp: int | None) -> None:
    """Raise BadRow where the model cannot be split by the tensor-parallel size that the flag gives."""
    complaint = divides.complaint(tp or 0)
    if complaint is not None:
        raise BadRow(COLUMN, f"--{flag} {tp}: {complaint}", "change the tensor-parallel size")


def gpu_count(spec: ModelSpec, found: WorldSize | None) -> tuple[int, bool]:
    """How many GPUs, and whether the flags say so; 0 = free choice.

    Raises BadRow where the flags and the hand-picked GPUs contradict each other.
    """
    picked = 0
    if spec.gpu_ids:
        per = spec.gpu_selector.gpus_per_replica if spec.gpu_selector else None
        picked = per or len(spec.gpu_ids)
        if per and per > len(spec.gpu_ids):
            raise BadRow(
                "gpu_selector.gpus_per_replica", f"{per} is more than the {len(spec.gpu_ids)} GPUs selected"
            )
    if found is None:
        return picked, False
    if picked and picked != found.size:
        if spec.skips_gpu_count_check:
            return picked, False
        raise BadRow(
            "gpu_selector",
            f"{picked} GPUs are selected per replica, but {'/'.join(found.labels)} ask for {found.size}",
            "change either, or set GPUSTACK_SKIP_GPU_COUNT_CHECK=1 in the model's env",
        )
    return found.size, True
