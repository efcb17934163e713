"""Threads that share jobs: all of a job is done once, and before the next begins, however slow one of them is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.kernels.cpu import build

SOURCE = """
#include <unistd.h>

#include "team.h"

using namespace pagemill;

// Jobs of `count` cells each: a cell becomes the sum of all cells of the job before, which must be there by then, plus 1
// for each time that it is done. Thread `slow` sleeps in each of its pieces. Gives the number of wrong cells.
extern "C" int walk(int num_threads, int num_lots, int num_jobs, int count, int grain, int slow) {
    std::vector<std::vector<std::int64_t>> cells(num_jobs + 1, std::vector<std::int64_t>(count, 0));
    cells[0].assign(count, 1);
    Progress progress(num_jobs, num_lots);
    for (int again = 0; again < 2; ++again) {
        for (int job = 1; job <= num_jobs; ++job) cells[job].assign(count, 0);
        progress.reset();
#pragma omp parallel num_threads(num_threads)
        {
            Team team(progress);
            for (int job = 0; job < num_jobs; ++job)
                team.run(count, grain, [&](Range range) {
                    if (team.thread() == slow) usleep(300);
                    std::int64_t sum = 0;
                    for (std::int64_t cell : cells[job]) sum += cell > 0;
                    for (std::int64_t i = range.begin; i < range.end; ++i) cells[job + 1][i] += sum == count ? 1 : -100;
                });
        }
    }
    int num_wrong = 0;
    for (const auto& job : cells)
        for (std::int64_t cell : job) num_wrong += cell != 1;
    return num_wrong;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team")
    shutil.copy(Path(build.__file__).parent / "team.h", folder)
    (folder / "walk.cpp").write_text(SOURCE)
    try:
        return build.open_library(folder, tier="portable")
    except build.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("slow", [-1, 0, 1])
@pytest.mark.parametrize("num_lots", [1, 2, 5])
@pytest.mark.parametrize("grain", [1, 3])
def test_a_job_is_done_once_and_before_the_next(library, grain, num_lots, slow):
    for num_threads in (1, 2, 3):
        for count in (1, 2, 7, 20):
            assert library.walk(num_threads, num_lots, 6, count, grain, slow) == 0, (num_threads, count)
    assert library.walk(2, num_lots, 3, 0, grain, slow) == 0
