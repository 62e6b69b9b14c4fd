"""SGLang as a policy engine, over its HTTP interface; one engine is one server, which somebody else has started.

``engine`` has :class:`~headrace.engines.sglang.engine.SglangEngine`, which implements ``protocols.Engine``; ``calls``
has one method for each route, ``wire`` the fields that are sent and read, ``start`` what a server must be like. Nothing
of SGLang is imported, and nothing here has run against a real SGLang: docs/sglang.md says what it was held to.
"""
