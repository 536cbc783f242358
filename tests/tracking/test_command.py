import sys

from runner.tracking import __main__


def test_uploader_output_hides_passwords(capsys):
    masked = __main__._Masked(sys.stdout, lambda text: text.replace("secret", "***"))
    print("a secret", file=masked, flush=True)
    assert capsys.readouterr().out == "a ***\n" and masked.fileno


def test_store_problem_names_the_cause(uri):
    with __main__.mlflow_store.settings():
        assert __main__.mlflow_store.problem(uri) is None
        silent = __main__.mlflow_store.problem("http://ann:s3cret@127.0.0.1:9")
    assert silent == "http://ann:***@127.0.0.1:9 does not answer"
