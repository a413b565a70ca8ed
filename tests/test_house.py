import homing


def test_the_package_names_its_version() -> None:
    assert homing.__version__
