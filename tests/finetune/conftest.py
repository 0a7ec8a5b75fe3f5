"""What the tests of the fine-tune job share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Where torch is imported: small matrices, of which more threads only wait for each other."""
    import sys

    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)
