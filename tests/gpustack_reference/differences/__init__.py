"""The table of deliberate differences. Of several classes that have something to say of a finding, the first
one counts."""

from tests.gpustack_reference.differences.difference import Difference
from tests.gpustack_reference.differences.filters import FILTERS
from tests.gpustack_reference.differences.gguf import GGUF
from tests.gpustack_reference.differences.places import PLACES
from tests.gpustack_reference.differences.queues import QUEUES
from tests.gpustack_reference.differences.refusals import REFUSALS
from tests.gpustack_reference.differences.scores import SCORES

TABLE: tuple[Difference, ...] = (*REFUSALS, *SCORES, *GGUF, *PLACES, *FILTERS, *QUEUES)
