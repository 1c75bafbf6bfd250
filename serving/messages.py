"""Values to messages of the wire."""

from collections.abc import Mapping

from tpuspec import theory
from tpuspec.config import EngineConfig
from tpuspec.measurement import CostReport, SpeculationStats
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.request import Ending, Finish, Origin, Request, Token, TokenChunk

_ORIGINS: Mapping[Origin, pb.Origin] = {
    Origin.PLAIN: pb.ORIGIN_PLAIN,
    Origin.ACCEPTED_DRAFT: pb.ORIGIN_ACCEPTED_DRAFT,
    Origin.CORRECTION: pb.ORIGIN_CORRECTION,
    Origin.BONUS: pb.ORIGIN_BONUS,
}
_REASONS: Mapping[Ending, pb.FinishReason] = {
    Ending.EOS: pb.FINISH_REASON_EOS,
    Ending.LENGTH: pb.FINISH_REASON_LENGTH,
    Ending.STOP: pb.FINISH_REASON_STOP,
}


def response(request: Request, chunk: TokenChunk, cost: CostReport | None,
             config: EngineConfig) -> pb.GenerateResponse:
    message = pb.GenerateResponse(
        request_id=request.request_id, index=chunk.index,
        tokens=[_token(token) for token in chunk.tokens],
        text="".join(token.text for token in chunk.tokens),
        drafted=chunk.steps.drafted, accepted=chunk.steps.accepted,
        speculation=speculation(chunk.stats, cost))
    if chunk.finish is not None:
        message.finish.CopyFrom(_finish(request, chunk.finish, chunk.stats, cost, config))
    return message


def _token(token: Token) -> pb.Token:
    return pb.Token(
        id=token.id, origin=_ORIGINS[token.origin], text=token.text, logprob=token.logprob,
        top_logprobs=[pb.TokenLogprob(id=i, logprob=value) for i, value in token.top_logprobs])


def speculation(stats: SpeculationStats, cost: CostReport | None) -> pb.Speculation:
    low, high = stats.alpha_interval() or (None, None)
    return pb.Speculation(
        target_runs=stats.steps, emitted=stats.emitted, drafted=stats.drafted,
        examined=stats.examined, accepted=stats.accepted, alpha=stats.alpha,
        alpha_overlap=stats.alpha_overlap, draft_acceptance_rate=stats.draft_acceptance_rate,
        tokens_per_target_run=stats.tokens_per_target_run, alpha_low=low, alpha_high=high,
        c=cost.c if cost is not None else None)


def cost(report: CostReport) -> pb.Cost:
    return pb.Cost(
        method=report.method, target_ms=report.target_ms, draft_ms=report.draft_ms, c=report.c,
        verify_widening={length: report.widening(length) for length in report.verify_ms},
        step_ms=dict(report.step_ms))


def predicted_speedup(alpha: float | None, draft_length: int | None, report: CostReport | None,
                      config: EngineConfig) -> float | None:
    """Eq. (5) with measured α, c and widening; None where one of them is unknown."""
    if not draft_length or alpha is None or report is None or report.c is None:
        return None
    # The verify pass is as wide as the rung that covers the draft length.
    widening = report.widening(config.rung(draft_length))
    return theory.speedup(alpha, draft_length, report.c, widening)


def _finish(request: Request, finish: Finish, stats: SpeculationStats,
            report: CostReport | None, config: EngineConfig) -> pb.Finish:
    timings = finish.timings
    observed = None
    if request.draft_length != 0 and report is not None and finish.decode_tokens:
        plain_seconds = 1e-3 * report.step_ms[0] * finish.decode_tokens
        observed = plain_seconds / timings.decode if timings.decode > 0 else None
    return pb.Finish(
        reason=_REASONS[finish.ending], stop=finish.stop, source_tokens=len(request.source),
        new_tokens=stats.emitted, seed=finish.seed, draft_length=request.draft_length,
        timings=pb.Timings(queue_seconds=timings.queue, first_token_seconds=timings.first_token,
                           decode_seconds=timings.decode, total_seconds=timings.total),
        predicted_speedup=predicted_speedup(stats.alpha, request.draft_length, report, config),
        observed_speedup=observed, decode_tokens=finish.decode_tokens,
        inexact=not request.sampling.exact)
