"""Several models behind one address (`--models-dir`): each in a `quire serve` of its own on a unix socket, started when
a request names it, stopped when it is idle or another one needs its place.

`process` runs one model, `pool` decides which are loaded, `relay` passes requests on, `app` has the routes.
"""
