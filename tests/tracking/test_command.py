import sys

from runner.tracking import __main__


def test_what_is_written_is_masked(capsys):
    masked = __main__._Masked(sys.stdout, lambda text: text.replace("secret", "***"))
    print("a secret", file=masked, flush=True)
    assert capsys.readouterr().out == "a ***\n" and masked.fileno


def test_a_store_that_answers_has_nothing_wrong_and_another_says_what(tmp_path):
    with __main__.mlflow_store.settings():
        assert __main__.mlflow_store.problem(f"sqlite:///{tmp_path}/mlflow.db") is None
        assert (
            __main__.mlflow_store.problem("http://ann:s3cret@127.0.0.1:9")
            == "http://ann:***@127.0.0.1:9 does not answer"
        )
