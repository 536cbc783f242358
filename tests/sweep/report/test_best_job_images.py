import re

from runner.sweep.report import build, page
from runner.sweep.report.best_job_images import MOST_BYTES, SIGNATURE, best_pictures


def test_the_best_jobs_pictures_are_in_the_page_and_nothing_else_of_its_folder(write, tmp_path):
    report = build.read_report(write.grid(tmp_path / "grid"))
    assert best_pictures(report) == "" and 'id="predictions"' not in page.draw(report)
    plots = report.folder / report.best.folder / "plots"
    plots.mkdir()
    (plots / "roc.png").write_bytes(SIGNATURE + b"roc")
    (plots / "confusion.png").write_bytes(SIGNATURE + b"matrix")
    (plots / "loss.png").write_bytes(SIGNATURE + b"a curve")
    (plots / "calibration.png").write_bytes(b"<script>")
    (plots / "samples.png").write_bytes(SIGNATURE + b"x" * MOST_BYTES)
    found = best_pictures(build.read_report(report.folder))
    assert re.findall(r'alt="(\w+)"', found) == ["confusion", "roc"]
    assert found in page.draw(build.read_report(report.folder))
