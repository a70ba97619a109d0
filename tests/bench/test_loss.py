"""The loss's benchmark sees what chunks save, and refuses what cannot be measured."""

import json

from diloco_ds.cli import main

MB = 2**20


def test_chunks_save_the_logits_of_all_tokens(capsys):
    sizes = ["--vocab", "16384", "--width", "16", "--tokens", "1024", "--chunks", "64", "--repeats", "1"]
    assert main(["bench", "loss", *sizes, "--json"]) == 0
    plain, chunked = json.loads(capsys.readouterr().out)["losses"]
    logits = 4 * 16384 * 1024 / MB
    assert (plain["chunk"], chunked["chunk"]) == (None, 64)
    assert plain["peak_mb"] > 2 * logits  # all of them in fp32, and their gradient
    assert chunked["peak_mb"] < logits / 2
    assert min(plain["seconds"], chunked["seconds"]) > 0


def test_sizes_that_make_no_sense_or_do_not_fit_are_refused(capsys):
    assert main(["bench", "loss", "--tokens", "0"]) == 2
    assert "--tokens: must be a whole number of 1 or more, not '0'" in capsys.readouterr().err
    assert main(["bench", "loss", "--tokens", str(10**9)]) == 2
    assert "take fewer --tokens" in capsys.readouterr().err
