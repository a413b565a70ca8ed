"""Does a server keep its promises while its workers are killed, stopped and restarted under load?

    app.py      what is served: sessions that count, and a journal of what ran when, which outlives a killed worker
    load.py     the clients, and what each of their calls came to
    faults.py   what is done to the server, when, and what each fault hit
    workers.py  the server's workers as they come and go
    place.py    where its records lie: looked into, and made too small
    oracle.py   reads the whole history and says where a promise was broken; plain functions
    run.py      one soak: server, load, faults, the return to rest, the report

`make soak SECONDS=60 SEED=7` runs one (`benchmarks/soak`); `tests/processes/test_soak.py` runs one in `make test`. The seed
fixes what every client does and which faults come when; what they meet is the machine's.
"""
