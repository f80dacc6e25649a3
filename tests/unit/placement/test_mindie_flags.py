"""Serving parameters of MindIE: read, limited, held against each other (Ascend spec section 2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.engines.flags import parse_flags
from gpustackd.engines.mindie.flags import serving
from gpustackd.errors import BadRow


def read(*flags: str, length: int = 8192, **env: str):
    return serving(parse_flags(flags), env, length)


def test_nothing_given_means_eight_tenths_and_undetermined_sizes():
    found = read()
    assert found.fraction == 0.8
    assert found.sizes == {"pp": 1, "tp": -1, "dp": -1, "cp": -1, "sp": -1, "moe_tp": -1, "moe_ep": -1}


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "4"],
        ["--tensor-parallel-size=4"],
        ["-tp", "4"],
        ["--tensor-parallel-size 4"],
        ["-tp=2", "--tensor-parallel-size=4"],
        ["--something-unknown=7", "-tp", "4"],
    ],
)
def test_a_size_may_be_written_in_many_ways_and_the_last_one_wins(flags):
    assert read(*flags).sizes["tp"] == 4


def test_the_fraction_comes_from_the_flag_then_from_the_environment():
    assert read(NPU_MEMORY_FRACTION="0.6").fraction == 0.6
    assert read("--npu-memory-fraction=0.5", NPU_MEMORY_FRACTION="0.6").fraction == 0.5


@pytest.mark.parametrize("raw", ["", "much", "0", "1.5", "nan", "-0.5"])
def test_a_fraction_in_the_environment_that_is_none_is_named(raw):
    with pytest.raises(BadRow, match="NPU_MEMORY_FRACTION"):
        read(NPU_MEMORY_FRACTION=raw)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--npu-memory-fraction=0"], "--npu-memory-fraction is 0"),
        (["--npu-memory-fraction=1.01"], "above 0 and at most 1"),
        (["--npu-memory-fraction=lots"], "'lots'"),
        (["--max-seq-len=0"], "--max-seq-len is 0"),
        (["--max-seq-len=x"], "--max-seq-len is 'x'"),
        (["--max-seq-len"], "--max-seq-len is given without a value"),
        (["--max-input-token-len=9000"], "from 1 to 8192"),
        (["--max-prefill-tokens=4096", "--max-input-token-len=5000"], "--max-prefill-tokens is 4096"),
        (["--max-prefill-tokens=9000"], "--max-prefill-tokens is 9000"),
        (["--max-iter-times=9000"], "--max-iter-times is 9000"),
        (["--max-batch-size=0"], "from 1 to 5000"),
        (["--max-batch-size=5001"], "from 1 to 5000"),
        (["--max-prefill-batch-size=0"], "--max-prefill-batch-size is 0"),
        (["--cache-block-size=96"], "power of two"),
        (["--cpu-mem-size=-1"], "--cpu-mem-size is -1"),
        (["--max-preempt-count=201"], "from 0 to 200"),
        (["--pipeline-parallel-size=0"], "must be positive"),
        (["-tp", "3"], "--tensor-parallel-size is 3, it must be a power of two"),
        (["-dp", "6"], "--data-parallel-size is 6"),
        (["-cp", "5"], "--context-parallel-size is 5"),
        (["-sp", "7"], "--sequence-parallel-size is 7"),
        (["-moe-ep", "12"], "--moe-expert-parallel-size is 12"),
        (["-moe-tp", "10"], "--moe-tensor-parallel-size is 10"),
        (["--log-level=loud"], "Verbose, Info"),
        (["--max-link-num=1001"], "from 1 to 1000"),
        (["--token-timeout=3601"], "from 1 to 3600"),
        (["--e2e-timeout=0"], "from 1 to 3600"),
        (["--openai-support="], "--openai-support is empty"),
        (["--kv-pool-config={oops"], "--kv-pool-config is '{oops', not JSON"),
        (["--rope-scaling=linear"], "--rope-scaling is 'linear', not JSON"),
        (["--async-scheduler-wait-time=0"], "from 1 to 3600"),
        (["--prefill-time-ms-per-req=1001"], "from 0 to 1000"),
        (["--decode-policy-type=4"], "from 0 to 3"),
        (["--max-queue-delay-microseconds=499"], "from 500 to 1000000"),
        (["--max-first-token-wait-time=3600001"], "from 0 to 3600000"),
        (["--dtype=int8"], "auto, half"),
        (["--rope-theta=wide"], "--rope-theta is 'wide'"),
        (["--policy-type=1"], "0, 4, 5, 6, 7"),
        (["--enable-split", "--split-chunk-tokens=100"], "multiple of 16"),
        (["--enable-split", "--split-chunk-tokens=8208"], "from 1 to 8192"),
        (["--enable-split", "--split-start-batch-size=201"], "--split-start-batch-size is 201"),
        (["--enable-memory-decoding", "--memory-decoding-length=17"], "from 1 to 16"),
        (["--enable-lookahead", "--lookahead-level=2"], "from 3 to 16"),
        (["--enable-lookahead", "--lookahead-window=17"], "from 1 to 16"),
        (["--enable-multi-token-prediction", "--multi-token-prediction-tokens=0"], "1 or more"),
        (["--enable-buffer-response"], "--enable-buffer-response needs --prefill-expected-time-ms"),
        (["--enable-buffer-response", "--prefill-expected-time-ms=5"], "needs --decode-expected-time-ms"),
        (["--max-loras=some"], "--max-loras is 'some'"),
    ],
)
def test_a_parameter_out_of_its_limits_is_named_with_its_value(flags, said):
    with pytest.raises(BadRow) as error:
        read(*flags)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-seq-len=32768", "--max-prefill-tokens=16384"],
        ["--max-input-token-len=-1", "--max-prefill-tokens=-1", "--max-iter-times=0"],
        ["--max-batch-size=20"],
        ["--max-preempt-count=0", "--cpu-mem-size=4"],
        ["--split-chunk-tokens=100"],
        ["--enable-split", "--no-enable-split", "--split-chunk-tokens=100"],
        ["--memory-decoding-length=17"],
        ["--enable-buffer-response", "--prefill-expected-time-ms=5", "--decode-expected-time-ms=5"],
        ['--rope-scaling={"type": "yarn", "factor": 4}'],
        ["--tensor-parallel-size=0", "--data-parallel-size=-4"],
        ["--enforce-eager", "--no-metrics", "--trust-remote-code"],
    ],
)
def test_what_the_server_accepts_passes(flags):
    assert read(*flags).fraction == 0.8


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--enable-split"], ["--enable-memory-decoding"]),
        (["--enable-split"], ["--enable-lookahead"]),
        (["--enable-split"], ["--rope-scaling={}"]),
        (["--enable-memory-decoding"], ["--enable-lookahead"]),
        (["--enable-memory-decoding"], ["--rope-scaling={}"]),
        (["--enable-lookahead"], ["--rope-scaling={}"]),
        (["--enable-multi-token-prediction"], ["--enable-memory-decoding"]),
        (["--enable-multi-token-prediction"], ["--enable-lookahead"]),
        (["--enable-multi-token-prediction"], ["--enable-split"]),
        (["--enable-multi-token-prediction"], ["--rope-scaling={}"]),
        (["--enable-prefix-caching"], ["--rope-scaling={}"]),
        (["-dp", "2"], ["--enable-memory-decoding"]),
        (["-dp", "2"], ["--enable-lookahead"]),
        (["-dp", "2"], ["--enable-split"]),
        (["-dp", "2"], ["--enable-prefix-caching"]),
    ],
)
def test_what_excludes_each_other_is_refused_in_either_order(one, other):
    for flags in (one + other, other + one):
        with pytest.raises(BadRow, match="exclude each other"):
            read(*flags)
    read(*one)
    read(*other)


def test_a_model_without_a_length_is_refused_with_what_to_do():
    with pytest.raises(BadRow, match="set --max-seq-len"):
        read(length=0)
    assert read("--max-seq-len=512", length=0).fraction == 0.8


NAMES = (
    "max-seq-len", "max-batch-size", "npu-memory-fraction", "tp", "pp", "dp", "moe-ep", "rope-scaling",
    "models", "enable-split", "no-enable-split", "split-chunk-tokens", "enable-lookahead", "dtype", "x",
)  # fmt: skip
VALUES = st.sampled_from(
    ["", "1", "0", "-1", "4", "1e3", "nan", "inf", "{}", "[", "true", "auto", "9" * 30]
) | st.text(max_size=6)


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.none() | VALUES), max_size=6))
def test_whatever_is_written_is_read_or_refused(given_flags):
    flags = [f"--{n}" if v is None else f"--{n}={v}" for n, v in given_flags]
    try:
        found = read(*flags)
    except BadRow:
        return
    assert 0 < found.fraction <= 1
    assert found.sizes["pp"] > 0
