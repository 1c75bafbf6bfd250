"""``tpuspec generate`` without a server, and the engines that commands build."""

import json
import shutil

import pytest
from tiny_vocabularies import byte_vocabulary

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import generate, models
from tpuspec.serving.cli import make_parser
from tpuspec.serving.client import make_request
from tpuspec.serving.local import _config


def test_texts_are_answered_in_this_process(fake_models, capsys):
    args = make_parser().parse_args(["generate", "--json", "--max_new_tokens", "3",
                                     *(f"w{n}" for n in range(30, 50))])
    assert generate.run(args) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["id"] for record in records] == [str(n) for n in range(20)]
    assert [record["token_ids"] for record in records] == [[n + 1, n + 2, n + 3]
                                                           for n in range(30, 50)]
    assert records[0]["text"] == "one two three"
    assert generate.run(make_parser().parse_args(["generate", "--draft_length", "99", "zero"])) == 1
    assert "draft_length must be in [0, 16], got 99" in capsys.readouterr().err


def test_only_what_the_requests_need_is_compiled(tiny_pair):
    pair = models.Pair(target=tiny_pair / "target", draft=tiny_pair / "draft")
    config = _config([make_request([5] * 20, draft_length=2, max_new_tokens=300)], pair)
    assert (config.slots, config.source_buckets) == (1, (32,))
    assert (config.draft_lengths, config.draft_length) == ((0, 2), 2)
    assert config.max_target_length == 300
    absurd = make_request([5] * 5000, draft_length=10**6, max_new_tokens=10**6)
    config = _config([absurd, make_request("one"), make_request([5], draft_length=-1)], pair)
    assert config.source_buckets == (2048,) and config.draft_lengths == (0, 3, 16)
    assert config.max_target_length == 4096
    prompted = [make_request([5], decoder_prompt=[5] * 20, max_new_tokens=300)]
    assert _config(prompted, pair).max_target_length == 332
    alone = models.Pair(target=pair.target, draft=None)
    assert _config([pb.GenerateRequest(text="one")], alone).draft_lengths == (0,)
    assert _config([], pair).slots == 1


def test_draft_with_another_vocabulary_is_refused(tiny_pair, tmp_path):
    shutil.copytree(tiny_pair / "draft", tmp_path / "draft")
    byte_vocabulary().save(tmp_path / "draft")
    pair = models.Pair(target=tiny_pair / "target", draft=tmp_path / "draft")
    with pytest.raises(ValueError, match="draft must have the target's vocabulary: id "):
        models.load(pair, _config([], pair))


def test_draft_alone_is_refused():
    with pytest.raises(ValueError, match="draft needs a target"):
        with models.pair(None, "somewhere"):
            pass
