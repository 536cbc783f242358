import gc

import pytest

from runner.config.importing import loading


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_collector_is_off_only_inside(is_on):
    before = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(KeyError), loading():
            with loading():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if before else gc.disable)()
