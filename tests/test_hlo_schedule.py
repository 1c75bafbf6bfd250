"""The schedule of a compiled program and its estimate, on a program written by hand."""

import dataclasses

import pytest

from tpuspec.chips import CHIPS, Chip
from tpuspec.hlo_schedule import Array, Schedule
from tpuspec.schedule_estimate import (
    ATTENTION_SECONDS,
    CACHE_CYCLES,
    WEIGHT_CYCLES,
    estimate,
)

# 1 cycle is 1 ns and 1 byte moves in 1 ns.
CHIP = Chip(bandwidth=1e9, flops=1e12, hbm_bytes=1, clock_hz=1e9, host="2x2")


def program(entry: str, others: str = "") -> str:
    return (f"HloModule jit_step, is_scheduled=true, entry_computation_layout={{}}\n\n{others}\n"
            f"ENTRY %main.1 (w: bf16[8,128]) -> f32[8] {{\n{entry}}}\n")


def op(name: str, shape: str, call: str, cycles: int | None = None, scope: str = "") -> str:
    cost = f', backend_config={{"estimated_cycles":"{cycles}"}}' if cycles is not None else ""
    named = f', metadata={{op_name="{scope}"}}' if scope else ""
    return f"  %{name} = {shape} {call}{named}{cost}\n"


W = op("w", "bf16[500]{0}", "parameter(0)")
NEAR = op("near", "bf16[500]{0:T(8)S(1)}", "constant({...})")


def seconds(entry: str, others: str = "") -> float:
    return 1e9 * estimate(Schedule.parse(program(entry, others)), CHIP).seconds


def test_shapes_and_memory_spaces():
    schedule = Schedule.parse(program(
        W + op("t", "(f32[2,3]{1,0:T(8,128)S(3)}, pred[4]{0}, /*index=2*/s32[])",
               "fusion(%w), calls=%fused", 7, "jit(step)/while/body/verify/mul")))
    line = schedule.computations["main.1"][1]
    assert line.arrays == (Array(24, False, (2, 3)), Array(4, True, (4,)), Array(4, True, ()))
    assert (line.opcode, line.operands, line.cycles) == ("fusion", ("w",), 7)
    assert line.called("calls") == "fused" and line.scope.endswith("verify/mul")


def test_operations_run_one_after_the_other():
    assert seconds(NEAR + op("a", "f32[]", "fusion(%near)", 700)
                   + op("b", "f32[]", "fusion(%a)", 50)) == pytest.approx(750)


def test_operands_in_memory_take_bandwidth_and_never_more_than_their_operation():
    both = W + op("a", "f32[]", "fusion(%w)", 4000)
    assert seconds(both) == pytest.approx(4000)
    found = estimate(Schedule.parse(program(both)), CHIP)
    assert found.bytes == 1000
    table = W.replace("500", "50000") + op("rows", "f32[]", "fusion(%w)", 600)
    assert seconds(table) == pytest.approx(600)  # a gather does not read the whole table


def test_a_copy_runs_beside_the_cores_until_it_is_waited_for():
    copy = W + NEAR + op("c", "(bf16[500]{0:S(1)}, bf16[500]{0}, u32[]{:S(2)})", "copy-start(%w)")
    work = op("a", "f32[]", "fusion(%near)", 700)
    done = op("d", "bf16[500]{0:S(1)}", "copy-done(%c)")
    assert seconds(copy + work + done + op("e", "f32[]", "fusion(%d)", 100)) == pytest.approx(1100)
    assert seconds(copy + done + work) == pytest.approx(1700)


def test_a_counted_loop_runs_as_often_as_its_condition_says():
    others = ("%cond.1 (p: s32[]) -> pred[] {\n" + op("p", "s32[]", "parameter(0)")
              + op("n", "s32[]", "constant(8)") + op("lt", "pred[]", "compare(%p, %n)")
              + "}\n\n%body.1 (p: s32[]) -> s32[] {\n" + NEAR
              + op("a", "f32[]", "fusion(%near)", 300, "jit(f)/while/body/draft/dot") + "}\n")
    loop = W + op("l", "s32[]", "while(%w), condition=%cond.1, body=%body.1")
    assert seconds(loop, others) == pytest.approx(2400)
    found = estimate(Schedule.parse(program(loop, others)), CHIP)
    assert found.by_scope == {"draft/dot": pytest.approx(2400e-9)}
    with pytest.raises(ValueError, match="loop l has no constant bound"):
        seconds(loop, others.replace("constant(8)", "parameter(1)"))


def test_of_branches_the_fastest_counts():
    """They are what options do, of which a request may ask for none."""
    others = "".join(f"%{name} (p: s32[]) -> f32[] {{\n{NEAR}"
                     f"{op('a', 'f32[]', 'fusion(%near)', cycles)}}}\n\n"
                     for name, cycles in (("short.1", 10), ("long.1", 900)))
    entry = W + op("c", "f32[]", "conditional(%w, %w, %w), branch_computations="
                   "{%short.1, %long.1}")
    assert seconds(entry, others) == pytest.approx(10)


def test_a_kernel_takes_the_time_of_its_bytes_and_its_start():
    entry = W + op("verify_attention.3", "bf16[8]{0:S(1)}",
                   'custom-call(%w), custom_call_target="tpu_custom_call", '
                   'backend_config={"body":"estimated_cycles nonsense"}')
    assert seconds(entry) == pytest.approx(1e9 * ATTENTION_SECONDS + 1000)


def test_the_decoder_kernel_takes_the_longer_of_its_bytes_and_its_work():
    cache = op("c", "bf16[2,1,1,10,100]{4,3,2,1,0}", "parameter(1)")
    entry = W + cache + op("decoder_pass.3", "bf16[8]{0:S(1)}",
                           'custom-call(%w, %c), custom_call_target="tpu_custom_call"')
    assert seconds(entry) == pytest.approx(1e9 * ATTENTION_SECONDS + 5000)
    fast = dataclasses.replace(CHIP, bandwidth=1e15)
    found = estimate(Schedule.parse(program(entry)), fast).seconds
    work = (WEIGHT_CYCLES * 1000 + CACHE_CYCLES * 4000) / CHIP.clock_hz
    assert found == pytest.approx(ATTENTION_SECONDS + work)


def test_the_estimate_of_the_decoder_kernel_is_that_of_its_report():
    """T5-small on a v4, one slot and eight, bytes as in the stored cases."""
    for slots, us in ((1, 50.2), (8, 169.6)):
        cache = f"bf16[8,{slots},3,576,128]"  # of two: 640 and 512 positions
        entry = (op("w", "bf16[22020096]", "parameter(0)")
                 + "".join(op(f"c{i}", cache, f"parameter({i})") for i in (1, 2, 3, 4))
                 + op("decoder_pass.1", "bf16[8]{0:S(1)}", "custom-call(%w, %c1, %c2, %c3, %c4), "
                      'custom_call_target="tpu_custom_call"'))
        found = estimate(Schedule.parse(program(entry)), CHIPS["v4"]).seconds
        assert 1e6 * found == pytest.approx(us, rel=0.05)


@pytest.mark.parametrize("text, complaint", [
    ("HloModule jit_f, entry_computation_layout={}\n", "no schedule"),
    ("HloModule jit_f, is_scheduled=true\n\n%a (b: f32[]) -> f32[] {\n}\n", "no entry")])
def test_what_is_not_understood_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        Schedule.parse(text)
