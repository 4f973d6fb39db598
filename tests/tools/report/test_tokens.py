"""Numbers of the stored tokens against plain loops."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from references import moving_average_reference, ratio_tails

from qarl_trl.tools.report.draw import log_scale, moving_average
from qarl_trl.tools.report.runs import read_run
from qarl_trl.tools.report.texts import marked
from qarl_trl.tools.report.tokens import COLUMNS, FEWEST, FILES, PROBABILITIES, read_rows, read_tokens, tails

from .folders import row, token_rows, write_run, write_tokens


@pytest.fixture
def run(tmp_path):
    return read_run(str(write_run(tmp_path, [row(1)])))


def test_tokens_of_a_run(run):
    rows = token_rows(40)
    write_tokens(run.folder, rows)
    found = read_tokens(run)
    expected = {1: [], -1: []}
    weights, completions, of_sign = {1: [], -1: []}, [], {1: 0, -1: 0}
    for line in rows:
        for t, counts in enumerate(line["mask"]):
            if counts:
                if line["advantage"] and line["engine_logps"][t] is not None:
                    weights[line["advantage"]].append(math.exp(line["old_logps"][t] - line["engine_logps"][t]))
                if line["step"] > 1 and line["advantage"]:
                    r = math.exp(line["current_logps"][t] - line["old_logps"][t])
                    expected[line["advantage"]].append(r)
        if line["advantage"]:
            of_sign[line["advantage"]] += 1
        if line["step"] > 1 and line["advantage"] < 0:
            completions.append(line["ratio"])
    for sign, values in expected.items():  # float32 in the file
        assert sorted(found.of("token_r", sign)) == pytest.approx(sorted(values), rel=1e-6)
        assert sorted(found.of("token_w", sign)) == pytest.approx(sorted(weights[sign]), rel=1e-6)
        assert len(found.of("sequence_w", sign)) == of_sign[sign]
        assert 1.0 not in found.of("token_r", sign)  # control: the first update, where r is exactly 1, is left out
    assert sorted(found.of("sequence_r", -1)) == pytest.approx(sorted(completions), rel=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_tails_by_probability(run, sign):
    rows = token_rows(400)
    write_tokens(run.folder, rows)
    found = tails(read_tokens(run), sign)
    expected = ratio_tails(rows, sign, PROBABILITIES.tolist(), FEWEST)
    assert len(expected) >= 4
    assert pytest.approx(np.array(expected), rel=1e-5) == np.array(found).T  # float32 in the file
    other = ratio_tails(rows, -sign, PROBABILITIES.tolist(), FEWEST)
    assert np.array(other) != pytest.approx(np.array(expected), rel=1e-5)  # control: signs differ


def test_files_are_taken_evenly_and_one_that_is_cut_off_is_named(run):
    rows = [line | {"step": i} for i, line in enumerate(token_rows(3 * FILES))]
    write_tokens(run.folder, rows)
    files = run.parquet_files("token_stats")
    files[0].write_bytes(files[0].read_bytes()[:100])
    steps = [line["step"] for line in read_rows(run, files, COLUMNS)]
    assert len(steps) == FILES - 1 and steps[-1] == 3 * FILES - 1
    assert set(np.diff(steps)) <= {3, 4}
    assert run.unreadable == [files[0].name]
    pq.write_table(pa.table({"step": [1], "other": [2]}), files[1])
    assert list(read_rows(run, files[1:2], COLUMNS)) == []
    assert run.unreadable == [file.name for file in files[:2]]
    files[2].rename(files[2].with_name("token_stats_copy.parquet"))
    assert [file.name for file in run.parquet_files("token_stats")][:2] == ["token_stats_copy.parquet", files[0].name]


def test_without_tokens_there_is_nothing(run):
    assert read_tokens(run) is None


@pytest.mark.parametrize("width", [1, 3])
def test_moving_average(width):
    values = np.random.default_rng(0).normal(size=50)
    values[[3, 20, 21, 22, 23, 24, 25, 26]] = math.nan
    expected = moving_average_reference(values.tolist(), width)
    assert moving_average(values, width) == pytest.approx(expected, nan_ok=True)
    assert math.isnan(expected[23]) == (width < 4)  # control


def test_log_scale_is_for_decades_only_and_keeps_zeros():
    assert log_scale([np.array([1e-7, math.nan]), np.array([1e-2])]) == {"value": "log"}
    assert log_scale([np.array([1e-7, math.nan]), np.array([1e-2, 0.0])])["linthresh"] == 1e-7
    assert log_scale([np.array([0.1, 0.2]), np.array([0.0, math.inf])]) is None
    assert log_scale([]) is None


class Letters:
    def decode(self, ids, skip_special_tokens):
        return "".join("ab<c&d"[i] for i in ids)


def test_error_tokens_are_marked_in_escaped_text():
    line = {
        "token_ids": [0, 1, 2, 3, 4, 5],
        "error_mask": [False, False, True, True, True, False],
        "completion": "<x>",
    }
    assert marked(line, Letters()) == "ab<mark>&lt;c&amp;</mark>d"
    assert marked(line, None) == "&lt;x&gt;"
    long = {"token_ids": [0] * 500 + [2] + [1] * 500, "error_mask": [False] * 500 + [True] + [False] * 500}
    assert marked(long, Letters()) == "... " + "a" * 100 + "<mark>&lt;</mark>" + "b" * 299 + " ..."
