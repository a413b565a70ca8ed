"""What decodes bytes from outside, as functions of bytes that raise if something is wrong.

    targets.py   cookies, tokens, frames of the hop, owner records
    __main__.py  drives one of them with Atheris, guided by coverage: `make fuzz SECONDS=60`

`tests/contract/test_fuzzed.py` drives the same functions with hypothesis, for a few seconds, in `make test`.
"""
