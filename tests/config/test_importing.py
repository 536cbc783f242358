import gc

import pytest

from runner.config.importing import loading


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_off_inside_and_as_it_was_outside(is_on):
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
