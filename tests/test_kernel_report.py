"""The kernel report: its reading and replay of compiled kernels, and the stored figures.

``test_stored_figures_hold`` compiles, in about a minute on two cores, every kernel for
v4 and one of each module for the other generations. The whole table, some minutes, is
``pytest -m slow tests/test_kernel_report.py``, or ``tools/kernel_report.py``.
"""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import kernel_cases
import kernel_report
import llo_compiler
import llo_paths
import llo_replay
import numpy as np
import pytest
from kernel_case import GENERATIONS
from llo_dumps import Program, parse_bundles, parse_op, parse_vmem_report
from llo_scalars import ScalarCore, words
from llo_units import LATENCIES

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Four grid steps. Each copies a block of 21 granules; those of a slot longer than 100
# also do a matrix product.
BUNDLES = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = sld [smem:[#allocation0]] /* core id */  ;;  %s2_s2 = smov 0 /* { copy */ }
   0x1 LB: > { %s9_s4 = sadd.s32 1, %s3_s2  ;;  %s3_s2 = sphi %s2_s2, %s10_s2 /* phi */ \
} /* Start region 2 */
   0x2   : > { %s4_s3 = sld [smem:[#allocation1 + %s3_s2]]  ;;  %s5_s5 = scalar_lea.sflag \
[#allocation2], 1 }
   0x3   : > { %6 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s7_s6, /*size_in_granules=*/21, \
/*vmem=*/%s8_s7, /*dst_syncflagno=*/%s5_s5 /*
base_bounds: (8, 1, 32)
element_size_in_bytes: 2048 */ }
   0x4   : > { %p11_p0 = scmp.le.s32.totalorder %s4_s3, 100 }
   0x5   : > { %12 = sbr.rel (%p11_p0) target = $region4 }
   0x6   :  {} /* End region 3 */
   0x7   : > { %13 = vmatmul.bf16.gmra.mxu0 %v1_v1 }
   0x8   : > { %v2_v2 = vpop.f32.mrf.mxu0  ;;  %14 = vst [vmem:[#allocation5_spill] sm:$0xff] \
/*vst_source=*/%v2_v2 }
   0x9 PF: > { %15 = dma.done.wait [#allocation2 + $0x1], 21 } /* Start/End empty region 4 */
   0xa   : > { %s10_s2 = smov %s9_s4 }
   0xb   : > { %p16_p1 = scmp.ge.s32.totalorder %s9_s4, 4 /* loop exit test */ }
   0xc   : > { %17 = sbr.rel (!%p16_p1) target = $region2 }
   0xd   : > {}
   0xe   :  { %18 = vsyncpa [#allocation2], 1 } /* exit bundle */
"""
LENGTHS = np.array([0, 200, 100, 300], np.int32)

# The body runs until a reduction over a vector says so.
LOOP_BY_VECTORS = """\
     0   :  { %s1_s0 = smov 7 }
   0x1 LB: > { %v2_v0 = vmax.xlane.f32.xlu0 %v1_v1 } /* Start region 1 */
   0x2   : > { %v3_v2 = vpop.xlane.xlu0 %v2_v0 }
   0x3   : > { %4 = vpush %v3_v2 }
   0x4   : > { %s5_s1 = spop %4 }
   0x5   : > { %p6_p0 = scmp.gt.f32.partialorder %s5_s1, 0 }
   0x6   : > { %7 = sbr.rel (%p6_p0) target = $region1 }
   0x7   : > { %s8_s2 = smov (!%p6_p0), 3 }
   0x8   :  { %p9_p1 = scmp.eq.s32.totalorder %s8_s2, 3 }
   0x9   :  { %10 = sbr.rel (%p9_p1) target = $region5 }
   0xa   :  {}
   0xb   :  { %s11_s3 = smov 1 }
   0xc   :  { %s12_s4 = smov 1 } /* Start region 5 */
"""
SMEM = {
    "allocation0": "smem constant byte address 0x4 - core index",
    "allocation1": "prefetched SMEM operand 0",
}


def program(text: str) -> Program:
    return Program(*parse_bundles(text), SMEM, vmem_bytes=0, spill_bytes=0)


def replay(text: str, scalars=None, loop_trips=(), bytes_per_cycle=512.0) -> llo_replay.Replay:
    return llo_replay.replay(
        program(text), core=0, scalars=scalars or {}, loop_trips=loop_trips,
        latencies=LATENCIES["v4"], delay_slots=llo_replay.DELAY_SLOTS["v4"],
        copies=llo_replay.Copies(bytes_per_cycle, granule_bytes=512),
    )  # fmt: skip


def test_replay_agrees_with_a_count_by_hand() -> None:
    # Two bundles outside the loop. A turn has 13, of which two are skipped for the
    # lengths 0 and 100. The other two turns wait for the product: it takes 83 cycles
    # from one bundle to the next, 82 more than without a wait.
    found = replay(BUNDLES, {0: LENGTHS})
    assert found.bundles == 2 + 4 * 13 - 2 * 2
    assert found.cycles == found.bundles + 2 * 82
    # A copy takes 21 cycles. Turns that skip ask for it 4 bundles earlier than they
    # wait (0x3, 0x4, 0x5, 0x6, 0x9), and so wait 17 cycles; the others come later.
    assert found.copied_bytes == 4 * 21 * 512
    assert found.copy_cycles == 2 * 17


def test_copies_share_the_bandwidth_in_order() -> None:
    # At a tenth of the bandwidth a copy takes 210 cycles, and all turns wait: there is
    # one copy after the other, from the fourth bundle to the last wait.
    found = replay(BUNDLES, {0: LENGTHS}, bytes_per_cycle=51.2)
    turns = [13 - 2, 13 + 82, 13 - 2, 13 + 82]
    before_wait = [4, 4 + 2 + 82, 4, 4 + 2 + 82]
    assert sum(turns) + 2 == found.cycles
    assert found.copy_cycles == pytest.approx(sum(210 - cycles for cycles in before_wait))


def test_what_a_block_lacks_is_waited_for_but_not_copied() -> None:
    shorter = BUNDLES.replace(
        "0x3   : > {", "0x3   : > { %20 = vsyncadd [#allocation2 + $0x1], 1 ;;")
    shorter = shorter.replace("size_in_granules=*/21", "size_in_granules=*/20")
    assert shorter.count("vsyncadd") == 1
    found = replay(shorter, {0: LENGTHS})
    assert found.copied_bytes == 4 * 20 * 512
    assert found.copy_cycles == 2 * 16
    taken_back = BUNDLES.replace("%s10_s2 = smov %s9_s4", "%s10_s2 = smov %s9_s4  ;;  "
                                 "%21 = vsyncadd [#allocation2 + $0x1], 4294967275")
    assert replay(taken_back, {0: LENGTHS}) == replay(BUNDLES, {0: LENGTHS})


def test_skipped_work_is_not_charged() -> None:
    none, every = (replay(BUNDLES, {0: np.full(4, n, np.int32)}) for n in (0, 300))
    assert every.bundles - none.bundles == 4 * 2


def test_a_scalar_that_steers_must_be_given() -> None:
    with pytest.raises(ValueError, match="bundle 0x5 needs a scalar that was not given"):
        replay(BUNDLES)


def test_a_copy_that_never_started_is_an_error() -> None:
    with pytest.raises(ValueError, match="waits for a copy that was not started"):
        replay(BUNDLES.replace("wait [#allocation2 + $0x1], 21", "wait [#allocation2], 21"),
               {0: LENGTHS})


def test_the_exit_is_a_region_without_a_mark() -> None:
    marked = replay(LOOP_BY_VECTORS, loop_trips=[1])
    assert replay(LOOP_BY_VECTORS.replace("$region5", "$region9"), loop_trips=[1]) == marked


def test_loops_by_vectors_take_the_given_trips() -> None:
    assert [loop.data for loop in llo_paths.find_loops(program(LOOP_BY_VECTORS))] == [True]
    assert [loop.data for loop in llo_paths.find_loops(program(BUNDLES))] == [False]
    found = replay(LOOP_BY_VECTORS, loop_trips=[3])
    # 1 + 3 * 7 in the loop + the branch over 0xb, which is known to be taken.
    assert found.bundles == 1 + 3 * 7 + 4
    waits = (LATENCIES["v4"].reduce - 1) + (LATENCIES["v4"].to_scalar - 1)
    assert found.cycles == found.bundles + 3 * waits
    with pytest.raises(ValueError, match="1 loops end by what is in vectors, got 2"):
        replay(LOOP_BY_VECTORS, loop_trips=[3, 3])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("%s9 = sshra.s32 4294967292, 1", 4294967294),  # -4 >> 1
        ("%s9 = sshrl.u32 4294967292, 1", 2147483646),
        ("%s9 = ssub.s32 3, 5", 4294967294),
        ("%p9 = scmp.lt.s32.totalorder 4294967295, 0", True),
        ("%p9 = scmp.lt.u32.totalorder 4294967295, 0", False),
        ("%p9 = por %p1, %p7", True),  # p1 is true, p7 unknown
        ("%p9 = pnand %p1, %p7", None),
        ("%s9 = smov (%p1, %s2), 8", 8),
        ("%s9 = smov (!%p1, %s2), 8", 5),
        ("%s9 = scalar_select %p1, 3, 4", 3),
        ("%s9 = scalar_lea.vmem %s2, 2 [#allocation3]", 7),
        ("%s9 = sadd.s32 %s2, %s7", None),
        ("%s9 = sadd.f32 1065353216, 1065353216", 0x40000000),  # 1.0 + 1.0
    ],
)
def test_scalar_instructions(text: str, value: int | bool | None) -> None:
    core = ScalarCore(program(BUNDLES), 0, {})
    core.values |= {"p1": True, "s2": 5}
    op = parse_op(text)
    core.step(op, core.executes(op))
    assert core.values["p9" if text.startswith("%p") else "s9"] == value


def test_division_gives_quotient_then_remainder() -> None:
    core = ScalarCore(program(BUNDLES), 0, {})
    for text in ("%1 = sdivrem.u32 1000, 384", "%s2 = spop.drf %1", "%s3 = spop.drf %1"):
        core.step(parse_op(text), True)
    assert (core.values["s2"], core.values["s3"]) == divmod(1000, 384)


def test_rows_of_scalars_are_128_words_apart() -> None:
    assert words(np.array([[1, -1], [3, 4]], np.int32)) == {0: 1, 1: 2**32 - 1, 128: 3, 129: 4}
    assert words(np.array([1.0], np.float32)) == {0: 0x3F800000}
    with pytest.raises(ValueError, match="int32 or float32"):
        words(np.zeros(3, np.int64))


def test_spilled_registers_count_as_vmem() -> None:
    blocks = [{"allocations": [{"size": 100, "tag": "scratch"}, {"size": 20, "tag": "SPILL"}]}]
    data = {"hlo_breakdowns": {"k.1": {"blocks": blocks, "total_size": 120}}}
    html = f"<script>const DATA = {json.dumps(data)};</script>"
    assert parse_vmem_report(html, "k.1") == (120, 20)


def test_a_compiled_kernel_agrees_with_a_count_by_hand(tmp_path) -> None:
    """A kernel of a few lines, through the real compiler, for v4 with its two cores."""
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "tiny_kernel.py", tmp_path],
        env=os.environ
        | llo_compiler.environment(tmp_path)
        | {"PYTHONPATH": str(ROOT / "tools")},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    facts = json.loads(done.stdout.splitlines()[-1])
    # Eight blocks of 128 KiB are read, eight written, by two cores; nothing else.
    assert facts["copied_bytes"] == [8 * 128 * 1024, 8 * 128 * 1024]
    # Of three loops, the grid's and the fori_loop end by scalars, one by a vector.
    assert sorted(facts["loops"]) == [False, False, True]
    # Core 0 has the slots 0 to 3, core 1 the others: one turn more for slot 5 is a turn
    # more for core 1. Its 32 registers are each added to twice: at two additions a
    # bundle, that is 32 bundles or more.
    fewer, more = facts["turns"]
    assert more[0] == fewer[0]
    assert 32 <= more[1] - fewer[1] <= 100
    # One turn more of the loop by a vector, in each of a core's four slots.
    short, long = facts["trips"]
    assert (long[0] - short[0]) % 4 == 0 and long[0] > short[0]
    # An inert slot skips both loops; its block is copied all the same.
    assert facts["inert"][0] < fewer[0] and facts["inert"][1] == fewer[1]
    assert facts["inert_copied_bytes"] == facts["copied_bytes"]
    assert facts["vmem_bytes"] == 2 * 2 * 128 * 1024  # two operands, two buffers each


ROW = dict.fromkeys(kernel_report.KEYS) | {
    "kernel": "k", "generation": "v4", "compiles": True, "vmem_bytes": 9, "vmem_limit_bytes": 10,
    "bundles": 1000, "replay_us": 2.0, "dma_us": 3.0, "predicted_us": 4.0, "roofline": 0.75,
    "spill_bytes": 0, "copied": 1.0, "bound": "HBM",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"bundles": 1100, "predicted_us": 4.4}, None),
        ({"bundles": 1101}, "bundles was 1000, is 1101"),
        ({"predicted_us": 4.41}, "predicted_us was 4.0, is 4.41"),
        ({"bundles": 10, "predicted_us": 0.1}, None),
        ({"vmem_bytes": 9.1}, "takes 91% of the VMEM, more than 90%"),
        ({"compiles": False, "error": "no such op\nmore", "bundles": None}, "no such op"),
    ],
)
def test_what_the_report_fails_on(change: dict, fault: str | None) -> None:
    assert kernel_report.faults(ROW | change, ROW) == ([fault] if fault else [])


@pytest.fixture
def reported(monkeypatch, tmp_path):
    """The report's command with a stand-in for the compiler, and one stored row."""
    name = next(iter(kernel_cases.CASES))
    row = ROW | {"kernel": name}
    monkeypatch.setattr(kernel_report, "GOLDEN", tmp_path / "golden.json")
    monkeypatch.setattr(kernel_report, "run_estimate",
                        lambda kernels, g: [row | {"kernel": k, "generation": g} for k in kernels])
    monkeypatch.setattr(kernel_report.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernel_report.importlib.metadata, "version", lambda name: "1.0")
    return lambda *arguments: kernel_report.main(["--kernel", name, *arguments]), row


def test_json_is_a_list_of_rows_with_exactly_the_promised_keys(reported, capsys) -> None:
    main, row = reported
    assert main("--update-golden") == 0
    capsys.readouterr()
    assert main("--json", "--generation", "v5e", "--generation", "v4") == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [list(row) for row in rows] == [list(kernel_report.KEYS)] * 2
    assert [row["generation"] for row in rows] == ["v4", "v5e"]
    assert "not measurements" in err


def test_costs_are_held_against_the_stored_ones(reported, capsys) -> None:
    main, row = reported
    assert main("--generation", "v4") == 1  # nothing stored yet
    assert "no stored figures" in capsys.readouterr().err
    assert main("--update-golden") == 0
    assert main() == 0
    row["bundles"] = 2000
    capsys.readouterr()
    assert main("--generation", "v4") == 1
    out, err = capsys.readouterr()
    assert out.startswith("Static estimates, not measurements")
    assert "bundles was 1000, is 2000" in err
    assert main("--generation", "v4", "--update-golden") == 0  # the others stay
    assert main("--generation", "v4") == 0
    assert main("--generation", "v5e") == 1


def test_figures_of_a_kernel_that_does_not_fit_are_not_stored(reported, capsys) -> None:
    main, row = reported
    assert main("--generation", "v4", "--update-golden") == 0
    row["vmem_bytes"] = 10
    assert main("--update-golden") == 1
    assert "takes 100% of the VMEM" in capsys.readouterr().err
    assert [g for _, g in kernel_report.load_golden()[1]] == ["v4"]


def test_figures_of_another_compiler_are_not_compared(reported, monkeypatch, capsys) -> None:
    main, row = reported
    assert main("--update-golden") == 0
    row["bundles"] = 2000
    monkeypatch.setattr(kernel_report.importlib.metadata, "version", lambda name: "2.0")
    assert main() == 0
    assert "stored with libtpu 1.0, this is 2.0" in capsys.readouterr().err
    row["vmem_bytes"] = 10
    assert main() == 1


def test_without_libtpu_it_says_so(reported, monkeypatch, capsys) -> None:
    main, _ = reported
    monkeypatch.setattr(kernel_report.importlib.util, "find_spec", lambda name: None)
    assert main() == 1
    assert "pip install libtpu" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--kernel", "no_such"], ["--generation", "v1"], ["-x"]])
def test_wrong_arguments_end_with_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        kernel_report.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_a_compiler_that_dies_is_a_row_too(monkeypatch, tmp_path) -> None:
    script = tmp_path / "kernel_estimate.py"
    script.write_text("import sys; sys.exit('the compiler fell over')")
    monkeypatch.setattr(kernel_report, "__file__", str(tmp_path / "kernel_report.py"))
    (row,) = kernel_report.run_estimate(["k"], "v4")
    assert row["compiles"] is False and "the compiler fell over" in row["error"]


def test_stored_figures_are_of_the_cases_there_are() -> None:
    _, golden = kernel_report.load_golden()
    assert list(golden) == [(name, g) for name in kernel_cases.CASES for g in GENERATIONS]


def test_stored_figures_reach_what_is_promised() -> None:
    _, golden = kernel_report.load_golden()
    shape = "_B=8_N=64_G=8_H=64_"
    verify, cross = f"verify_attention{shape}T=512", f"cross_attention{shape}S=512"
    one_slot = verify.replace("B=8", "B=1")
    v4_us = {name: row["predicted_us"] for (name, g), row in golden.items() if g == "v4"}
    assert v4_us[verify] <= 66
    assert v4_us[one_slot] <= 9
    assert v4_us[f"{verify}_length=250"] <= 0.6 * v4_us[verify]
    sample = "rejection_sample_B=8_G=8_V=32128"
    assert v4_us[f"{sample}_top_k,top_p"] <= 100
    assert v4_us[f"{sample}_greedy"] <= 25 and v4_us[f"{sample}_temperature"] <= 25
    for kernel in (verify, cross):
        for generation, least in (("v4", 0.95), ("v5e", 0.95), ("v5p", 0.95), ("v6e", 0.75)):
            assert golden[kernel, generation]["roofline"] >= least, (kernel, generation)
    for generation in GENERATIONS:
        assert golden[one_slot, generation]["roofline"] >= 0.85, generation


def check_rows(pairs: list[tuple[str, str]]) -> None:
    libtpu, golden = kernel_report.load_golden()
    assert libtpu == importlib.metadata.version("libtpu"), "see kernel_report.py --update-golden"
    rows = kernel_report.run_estimates(pairs)
    found = {
        pair: faults
        for pair, row in zip(pairs, rows, strict=True)
        if (faults := kernel_report.faults(row, golden[pair]))
    }
    assert not found


def test_stored_figures_hold() -> None:
    pytest.importorskip("libtpu")
    cases = kernel_cases.CASES.values()
    of_module = {case.build.__module__: case.name for case in cases}
    check_rows(
        [(case.name, "v4") for case in cases]
        + [(name, g) for name in of_module.values() for g in GENERATIONS if g != "v4"]
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_stored_figures_hold() -> None:
    pytest.importorskip("libtpu")
    check_rows([(name, g) for name in kernel_cases.CASES for g in GENERATIONS if g != "v4"])
