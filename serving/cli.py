"""The console script ``tpuspec``: flags here, work in one module per command.

JAX, and what needs it, is imported only by the command that uses it.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import app, logging
from absl.flags import argparse_flags

from tpuspec import platform
from tpuspec.config import Activation, EngineConfig, Sampler, check_range

_SHAPES = EngineConfig()


def main() -> None:
    """Exits with 0, with 1 after an error, or with 2 after wrong flags."""
    app.run(_run, flags_parser=lambda argv: make_parser().parse_args(argv[1:]))


def _run(args: argparse.Namespace) -> int:
    logging.set_verbosity(logging.WARNING)  # libraries say much at INFO while loading
    try:
        if "platform" in args and not any(getattr(args, name, None) for name in ("server", "ray")):
            # Before JAX is imported, which the command's module may do.
            platform.choose(args.platform)
            if sys.stderr.isatty():
                print("starting JAX, which takes some seconds ...", file=sys.stderr)
        return importlib.import_module(f"tpuspec.serving.{args.command}").run(args)
    except BrokenPipeError:
        # Whoever read has enough, as in `tpuspec plan | head -1`. The rest, which the interpreter
        # would write at its end, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(f"tpuspec {args.command}: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "initialize backend" not in str(error):
            raise
        # Busy, or locked by a process that died: never a silent run on the CPU.
        print(f"tpuspec {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1


class _Help(argparse.HelpFormatter):
    """Says what a flag is if it is not given, where that is something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if (not action.option_strings or default in (None, "", (), 0.0, argparse.SUPPRESS)
                or isinstance(default, bool | dict)):
            return action.help
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        return f"{action.help or ''} (default: {shown})".lstrip().replace("%", "%%")


class _Parser(argparse_flags.ArgumentParser):
    """Whoever mistypes a flag is shown the flags of the command, and the nearest one."""

    def __init__(self, **options: object):
        super().__init__(**{"formatter_class": _Help, "allow_abbrev": False} | options)

    def parse_known_args(self, args=None, namespace=None):
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag, flags = unknown[0].partition("=")[0], self._option_string_actions
            near = [known for known in flags if known.startswith(flag)] or (
                difflib.get_close_matches(flag, flags, n=1))
            self.error("unrecognized arguments: " + " ".join(unknown)
                       + (f"; did you mean {near[0]}?" if near else ""))
        return found, unknown


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tpuspec", description="Exact speculative decoding of T5 models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary, add_flags in (
            ("serve", "serve a pair over gRPC", _serve_flags),
            ("generate", "generate from texts, in process or with a server", _generate_flags),
            ("batch", "generate for every line of a file; goes on where it was interrupted",
             _batch_flags),
            ("demo", "stream translations of the bundled pair and measure the speed-up",
             _demo_flags),
            ("bench", "put a server under load; times, throughput and what speculation gains",
             _bench_flags),
            ("top", "slots, acceptance, cost and throughput of a running server, live",
             _top_flags),
            ("profile", "take a profiler trace of a running server", _profile_flags),
            ("convert", "make a checkpoint of what Hugging Face or T5X saved, or of a checkpoint",
             _convert_flags),
            ("inspect", "say what a checkpoint is, and what it can be a pair with",
             _inspect_flags),
            ("measure", "measure alpha, or what it takes, on this machine", _measure_flags),
            ("verify", "test that a pair samples exactly what its target would, on this machine",
             _verify_flags),
            ("report", "one page with figures, of what measure, verify and demo said as JSON",
             _report_flags),
            ("plan", "what a pair should gain by Eq. (5), by draft length", _plan_flags),
            ("compile", "compile the programs of a pair for a TPU that need not be there: "
             "memory, estimated times, what to expect", _compile_flags)):
        add_flags(commands.add_parser(name, help=summary, description=summary + "."))
    return parser


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ("Where OpenTelemetry is installed (pip install 'tpuspec[otel]') and "
                     "OTEL_EXPORTER_OTLP_ENDPOINT names a collector, a span of every request "
                     "goes there.")
    _model_flags(parser)
    _sampler_flag(parser)
    parser.add_argument("--host", default="localhost",
                        help="address to listen on; 0.0.0.0 is every IPv4 interface")
    parser.add_argument("--port", type=_integer(0, 65535), default=8500, help="0 is a free one")
    parser.add_argument("--metrics_port", type=_integer(0, 65535),
                        help="serves Prometheus metrics; 0 is a free port, none is no metrics")
    parser.add_argument("--slots", type=_integer(1), default=_SHAPES.slots,
                        help="requests that run at once")
    parser.add_argument("--queue_limit", type=_integer(0), default=64,
                        help="requests that may wait; more are refused")
    parser.add_argument("--queue_tokens", type=_integer(0),
                        help="tokens that those may take (source, decoder prompt and "
                             "max_new_tokens); any number, if not given")
    parser.add_argument("--source_buckets", type=_integers(1),
                        default=_SHAPES.source_buckets,
                        help="compiled source lengths; the last is the longest source")
    parser.add_argument("--max_target_length", type=_integer(1),
                        default=_SHAPES.max_target_length,
                        help="most new tokens of a request")
    parser.add_argument("--draft_lengths", type=_integers(0),
                        help="compiled draft lengths, beginning with 0; if not given, 0 and the "
                             "draft length, or several to choose from with auto")
    parser.add_argument("--draft_length", type=_integer_or_auto, default=_SHAPES.draft_length,
                        metavar="N|auto", help="of requests that name none; auto chooses before "
                        "every target run, by what was accepted and how long runs take")
    parser.add_argument("--ngram_drafts", action="store_true",
                        help="look drafts up in source and output: what followed the last tokens "
                             "before. Beside a draft model with auto alone, which chooses")
    parser.add_argument("--grace_seconds", type=float, default=30.0,
                        help="for running requests after SIGTERM")
    _certificate_flags(parser, "of the server, PEM; turns TLS on")
    parser.add_argument("--tls_client_ca", metavar="FILE",
                        help="clients must have a certificate signed by this one")
    parser.add_argument("--token_file", metavar="FILE",
                        help="tokens, one a line; a call must bring one of them. Files are read "
                             "again when they change")
    parser.add_argument("--no_reflection", action="store_true",
                        help="do not tell clients what services there are")
    parser.add_argument("--jetstream_truncate", action="store_true",
                        help="in JetStream's dialect cut token ids and max_tokens that are beyond "
                             "the limits: its benchmark repeats refused requests for ever")
    parser.add_argument("--profile_dir", metavar="DIR",
                        help="clients may have the server traced; traces are kept here. Without "
                             "it they may not")
    parser.add_argument("--log_json", action="store_true",
                        help="log JSON, an object a line")


def _generate_flags(parser: argparse.ArgumentParser) -> None:
    _model_flags(parser)
    _sampler_flag(parser)
    parser.add_argument("text", nargs="*", help="sources; without any, lines of standard input")
    parser.add_argument("--input", metavar="FILE.jsonl",
                        help='one JSON object a line: "text" or "token_ids", and if you like '
                             '"id" and any of the flags below')
    parser.add_argument("--server", metavar="HOST:PORT", help="use a server, not this process")
    _client_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    _option_flags(parser)
    parser.add_argument("--seed", type=_integer(0), help="fresh for every source without it")
    parser.add_argument("--max_new_tokens", type=_integer(1))
    parser.add_argument("--draft_length", type=_integer(0), help="0 is plain decoding")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for each source")
    parser.add_argument("--priority", type=int, default=0,
                        help="in a server's queue, -100 to 100: higher ones first")
    parser.add_argument("--label", default="", help="kind of the request, for a server's metrics "
                        "and its choice of draft lengths")


def _batch_flags(parser: argparse.ArgumentParser) -> None:
    _model_flags(parser)
    _sampler_flag(parser)
    parser.add_argument("--input", required=True, metavar="FILE",
                        help='.jsonl: objects with "input" or "token_ids", and if you like "id", '
                             '"target" and parameters; .txt: every line a source; also .gz and '
                             "gs://")
    parser.add_argument("--output", required=True, metavar="FILE",
                        help="new .jsonl or .txt, also .gz and gs://; FILE.job keeps what is done")
    parser.add_argument("--ids", action="store_true", help="token ids in the output, too")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad line")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON document")
    parser.add_argument("--ray", metavar="ADDRESS",
                        help="engines of a Ray cluster's hosts do the work: auto is the cluster "
                             "that this machine is in, local one of its own")
    parser.add_argument("--workers", type=_integer(1),
                        help="engines with --ray; as many as there are chips for (hosts, without "
                             "accelerators), if not given")
    parser.add_argument("--slots", type=_integer(1), default=16,
                        help="lines that run at once, on each engine")
    parser.add_argument("--source_buckets", type=_integers(1), default=_SHAPES.source_buckets,
                        help="compiled source lengths; the last is the longest source")
    parser.add_argument("--max_new_tokens", type=_integer(1), default=_SHAPES.max_target_length,
                        help="of lines that name none, and the most of those that do")
    parser.add_argument("--draft_length", type=_integer(0), default=_SHAPES.draft_length,
                        help="the same for drafts; 0 is plain decoding")
    _option_flags(parser)
    parser.add_argument("--seed", type=_integer(0, 2**64 - 1),
                        help="of the job; with its id it makes each line's seed. Fresh, and kept "
                             "in FILE.job, without it")


def _option_flags(parser: argparse.ArgumentParser) -> None:
    """``tpuspec.serving.client.OPTIONS``; the door checks their bounds."""
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top_k", type=int, default=0, help="0 is off")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 is off")
    parser.add_argument("--min_p", type=float, default=0.0, help="0 is off")
    parser.add_argument("--repetition_penalty", type=float, default=1.0,
                        help="of ids among the output so far, divides positive logits and "
                             "multiplies others; 1 is off")
    parser.add_argument("--presence_penalty", type=float, default=0.0,
                        help="taken off the logits of such ids; 0 is off")
    parser.add_argument("--frequency_penalty", type=float, default=0.0,
                        help="the same, times how often they came; 0 is off")
    parser.add_argument("--logit_bias", type=_biases, default={}, metavar="ID:VALUE,...",
                        help="added to logits")
    parser.add_argument("--banned_ids", type=_integers(0), default=(), help="ids that never come")
    parser.add_argument("--allowed_ids", type=_integers(0), default=(),
                        help="the only ids that come")
    parser.add_argument("--min_new_tokens", type=_integer(0), default=0,
                        help="neither end ids nor stops end the output before")
    parser.add_argument("--stop", action="append", default=[], metavar="STRING",
                        help="ends the output before this; may be repeated")
    parser.add_argument("--eos_ids", type=_integers(0), default=(), help="ids that end the output")
    parser.add_argument("--ignore_eos", action="store_true", help="run to the length limit")
    parser.add_argument("--decoder_prompt", default="", metavar="TEXT",
                        help="what the output begins with; not part of what comes out")
    parser.add_argument("--logprobs", type=_integer(0), metavar="N",
                        help="log-probabilities of the tokens and of the N most likely ids at "
                             "their places, in JSON")
    parser.add_argument("--n", type=int, default=1, help="samples of each source")
    parser.add_argument("--lenience", type=float, default=1.0,
                        help="below 1, drafts are accepted more often and the output is not exact")


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", required=True, metavar="HOST:PORT")
    _client_flags(parser)
    parser.add_argument("--input", required=True, metavar="FILE.jsonl",
                        help="requests, as for generate --input; sent in turn")
    parser.add_argument("--rates", type=_numbers(1e-3), default=(1.0,),
                        help="requests a second, one after the other")
    parser.add_argument("--seconds", type=_number(1e-3), default=20.0,
                        help="of sending, for each rate and mode")
    parser.add_argument("--first_token_ms", type=_number(0.0),
                        help="goodput: the first token must come within this time")
    parser.add_argument("--token_ms", type=_number(0.0),
                        help="goodput: the later ones must, on average")
    parser.add_argument("--seed", type=_integer(0), default=0, help="of the times")
    parser.add_argument("--plot", metavar="FILE.html",
                        help="draw throughput, goodput, times and speed-up by rate, too: a page "
                             "that needs no other file")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _top_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", required=True, metavar="HOST:PORT")
    _client_flags(parser)
    parser.add_argument("--interval", type=_number(0.1), default=1.0, metavar="SECONDS",
                        help="between two looks, which rates are taken from")
    parser.add_argument("--once", action="store_true", help="show it once, after an interval")
    parser.add_argument("--json", action="store_true", help="one JSON document, with --once")


def _profile_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", required=True, metavar="HOST:PORT",
                        help="one that was started with --profile_dir")
    _client_flags(parser)
    parser.add_argument("--seconds", type=_number(0.1), default=3.0, help="to trace for")
    parser.add_argument("--output", required=True, metavar="DIR",
                        help="on this machine; xprof --logdir DIR shows what is in it")
    parser.add_argument("--json", action="store_true", help="what came, as one JSON document")


def _demo_flags(parser: argparse.ArgumentParser) -> None:
    _model_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document, no streaming")
    parser.add_argument("--draft_length", type=_integer(1), default=3)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")


def _convert_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="directory of Hugging Face's layout "
                        "(safetensors or pytorch_model.bin), of T5X, or a checkpoint")
    parser.add_argument("out", metavar="OUT", help="new directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"),
                        help="of the weights; as stored, if not given")
    parser.add_argument("--quantize", choices=("int8",),
                        help="of the linear maps other than feed-forward output and logits, "
                             "which keep the dtype")
    parser.add_argument("--vocabulary", metavar="FILE",
                        help="SentencePiece file or tokenizer.json, where none is beside the "
                             'weights; "bytes" is ByT5\'s')
    parser.add_argument("--activation", choices=tuple(Activation),
                        help="for T5X, whose files do not say which gate a model has; that of "
                             "the public model of the same shapes, or gated-gelu, if not given")
    parser.add_argument("--check", metavar="EXPECTED",
                        help="afterwards compare logits, in float32, with those in an .npz file "
                             "or with another source; exit code 1 if they differ. Takes 4 bytes "
                             "of memory for each parameter")
    parser.add_argument("--tolerance", type=_number(0.0),
                        help="of the check: a share of the largest logit; by the dtype of the "
                             "weights, if not given")
    parser.add_argument("--json", action="store_true", help="what was made, or what --check "
                        "found, as one JSON document")
    parser.set_defaults(platform="cpu")


def _inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT",
                        help="or anything that convert reads; nothing is loaded")
    parser.add_argument("--against", metavar="OTHER",
                        help="say whether the two can be target and draft; exit code 1 if not")
    parser.add_argument("--verify", action="store_true",
                        help="read all weights and compare them with their checksums")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(platform="cpu")


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alpha", type=_numbers(0.0, 1.0), required=True,
                        help="acceptance rate: one, or one for each position of a draft")
    parser.add_argument("--c", type=_number(0.0), required=True,
                        help="time of a draft pass over time of a target pass")
    parser.add_argument("--c_hat", type=_number(0.0),
                        help="the same for operations; as --c without it")
    parser.add_argument("--widening", type=_numbers(0.0), default=(1.0,),
                        help="time of a verify pass over that of a target pass of width 1, for "
                             "1, 2, ... drafts; the last holds for more")
    parser.add_argument("--longest", type=_integer(1), default=16, help="draft length looked at")
    parser.add_argument("--parameters", type=_number(1.0), metavar="N",
                        help="of the target: idealized times of its passes on v4, v5e, v5p, v6e")
    parser.add_argument("--draft_parameters", type=_number(1.0), metavar="N",
                        help="the same for the draft")
    parser.add_argument("--machine", type=_numbers(1e-3), metavar="GB/S,GFLOP/S",
                        help="another machine, by what measure cost found")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _measure_flags(parser: argparse.ArgumentParser) -> None:
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    for name, summary, add_flags in (
            ("alpha", "acceptance rate of any drafts along the target's own texts (Table 3)",
             _alpha_flags),
            ("speedup", "plain against speculative decoding of the same prompts, and what Eq. (5) "
             "expects (Tables 2 and 4)", _speedup_flags),
            ("cost", "c, the time of a pass over 1 to 16 positions, and the bandwidth they reach",
             _cost_flags)):
        add_flags(measurements.add_parser(name, help=summary, description=summary + "."))


def _alpha_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="DIR", help="checkpoint; without it the bundled one")
    parser.add_argument("--draft", metavar="DRAFT", action="append",
                        help="checkpoint, or one of bigram and unigram (tables of counts), ngram "
                             "(copies what followed the last tokens before) and uniform; may be "
                             "repeated. Without any: these four, and the bundled target's draft")
    _machine_flags(parser)
    _prompt_flags(parser)
    parser.add_argument("--corpus", metavar="FILE.txt",
                        help="texts, one a line, that the tables are made of; without it the "
                             "target's own outputs for every second source, held out")
    parser.add_argument("--tokens", type=_integer(1), default=10_000,
                        help="measured at each temperature; at 0 every source is used once")
    parser.add_argument("--top_k", type=_integer(0), default=0, help="0 is off")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 is off")
    parser.add_argument("--slots", type=_integer(1), default=8, help="texts written at once")


def _speedup_flags(parser: argparse.ArgumentParser) -> None:
    _model_flags(parser)
    _prompt_flags(parser)
    parser.add_argument("--draft_lengths", type=_integers(1), default=(1, 3, 5),
                        help="each against plain decoding")
    parser.add_argument("--repeats", type=_integer(1), default=5,
                        help="of every prompt, with other seeds")


def _cost_flags(parser: argparse.ArgumentParser) -> None:
    _model_flags(parser)
    parser.add_argument("--slots", type=_integers(1), default=(1,), help="batch sizes")
    parser.add_argument("--widths", type=_integers(1), default=tuple(range(1, 17)),
                        help="positions of a target pass")
    parser.add_argument("--source", type=_integer(1), default=64, help="source positions")
    parser.add_argument("--length", type=_integer(1), default=128, help="decoder positions")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _verify_flags(parser: argparse.ArgumentParser) -> None:
    _model_flags(parser)
    _source_flags(parser)
    parser.set_defaults(dtype="float32")  # rounding is not what is tested
    parser.add_argument("--draft_length", type=_integer(1), default=3)
    parser.add_argument("--samples", type=_integer(100), default=300,
                        help="outputs of each kind and source; four times as many see half the "
                             "bias")


def _report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("document", nargs="+", metavar="FILE.json",
                        help="what measure alpha, measure speedup, measure cost, verify or demo "
                             "printed with --json; at most one of each, known by its keys")
    parser.add_argument("--output", required=True, metavar="FILE.html",
                        help="the page; it needs no other file and no network")


def _prompt_flags(parser: argparse.ArgumentParser) -> None:
    _source_flags(parser)
    parser.add_argument("--temperatures", type=_numbers(0.0), default=(0.0, 1.0),
                        help="0 is greedy")
    parser.add_argument("--max_new_tokens", type=_integer(1), default=128)


def _source_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", metavar="FILE",
                        help="sources as for batch, .jsonl or .txt; parameters in lines are left "
                             "out. The bundled pair has some of its own")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _compile_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", default="v4", help="v4, v5e, v5p or v6e for one chip; "
                        "v4:2x2x1, v5e:2x2, v5p:2x2x1 or v6e:2x2 for a host")
    parser.add_argument("--all", action="store_true",
                        help="every generation, as one chip and as a host")
    parser.add_argument("--target", default="t5-v1_1-xxl",
                        help="name of a public size, or a checkpoint's directory, of any layout")
    parser.add_argument("--draft", default="t5-v1_1-small", help="the same; none is plain decoding")
    parser.add_argument("--slots", type=_integer(1), default=1, help="requests that run at once")
    parser.add_argument("--source", type=_integer(1), default=512, help="longest source")
    parser.add_argument("--length", type=_integer(2), default=512,
                        help="decoder positions, drafts included")
    parser.add_argument("--draft_lengths", type=_integers(0), default=(0, 5, 7),
                        help="compiled draft lengths, beginning with 0")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "int8"), default="bfloat16",
                        help="int8 is of the target's weights alone, beside bfloat16")
    parser.add_argument("--mesh", type=_integers(1, count=2), metavar="DATA,MODEL",
                        help="chips that share slots and weights; all share the weights, if "
                             "not given")
    parser.add_argument("--json", action="store_true",
                        help="one JSON document; a list of them with --all")
    parser.add_argument("--cache_dir", metavar="DIR",
                        help="keep the programs here, as JAX_COMPILATION_CACHE_DIR of a server "
                             "on such a host; the target must be a checkpoint")


def _client_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls", action="store_true", help="the server has TLS")
    parser.add_argument("--tls_ca", metavar="FILE",
                        help="TLS with these certificates to trust, not the usual ones")
    _certificate_flags(parser, "of this client, PEM")
    parser.add_argument("--token_file", metavar="FILE", help="its first line is the token to send")


def _certificate_flags(parser: argparse.ArgumentParser, whose: str) -> None:
    parser.add_argument("--tls_certificate", metavar="FILE", help=f"certificate {whose}")
    parser.add_argument("--tls_key", metavar="FILE", help="its private key")


def _model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="DIR", help="checkpoint; without it the bundled pair")
    parser.add_argument("--draft", metavar="DIR",
                        help="checkpoint; a target without one decodes plainly")
    _machine_flags(parser)


def _machine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", choices=("cpu", "tpu"), help="must be present")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"),
                        help="bfloat16 on TPU and float32 elsewhere, if not given; int8 is the "
                             "same with the target's weights quantized while loading")
    parser.add_argument("--mesh", type=_integers(1, count=2), default=(1, 1),
                        metavar="DATA,MODEL", help="devices that share slots and weights")


def _sampler_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sampler", choices=tuple(Sampler), type=Sampler,
                        default=Sampler.REJECTION,
                        help="how drafts are judged; coupled: a seed gives one output whatever the "
                             "draft and the draft length, and fewer drafts are accepted")


def _bounded[Value: (int, float)](value: Value, low: float, high: float | None) -> Value:
    try:
        check_range("it", value, low, high)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("it ")) from None
    return value


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def integer(text: str) -> int:
        return _bounded(int(text), low, high)

    return integer


def _integer_or_auto(text: str) -> int | None:
    return None if text == "auto" else _integer(0)(text)


def _number(low: float, high: float | None = None) -> Callable[[str], float]:
    def number(text: str) -> float:
        return _bounded(float(text), low, high)

    return number


def _numbers(low: float, high: float | None = None) -> Callable[[str], Sequence[float]]:
    def numbers(text: str) -> Sequence[float]:
        return tuple(_number(low, high)(part) for part in text.split(","))

    return numbers


def _integers(low: int, count: int | None = None) -> Callable[[str], Sequence[int]]:
    def integers(text: str) -> Sequence[int]:
        values = tuple(_integer(low)(part) for part in text.split(","))
        if count is not None and len(values) != count:
            raise argparse.ArgumentTypeError(f"must be {count} numbers, got {text}")
        return values

    return integers


def _biases(text: str) -> Mapping[int, float]:
    pairs = (part.split(":") for part in text.split(","))
    return {int(token): float(value) for token, value in pairs}
