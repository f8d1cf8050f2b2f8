"""What the contract kit calls the notifiers with: an unused port on this machine, and one attempt."""

_NOBODY = "http://127.0.0.1:9/hook-7d1f0c62"
_ONCE = {"timeout": 1.0, "retries": 0}

DING = {"kwargs": {"ding_url": f"{_NOBODY}?access_token=5b0c1a", "secret": "SEC-9f21c7", **_ONCE}}
FEISHU = {"kwargs": {"url": _NOBODY, "secret": "9f21c7-e8", **_ONCE}}
URL = {"kwargs": {"url": _NOBODY, **_ONCE}}
WEBHOOK = {"kwargs": {"url": _NOBODY, "headers": {"Authorization": "Bearer 9f21c7"}, **_ONCE}, "secrets": ("9f21c7",)}
MAIL = {
    "kwargs": {
        "host": "127.0.0.1",
        "port": 9,
        "sender": "run@example.org",
        "recipients": ["team@example.org"],
        "user": "run",
        "password": "9f21c7-e8",
        **_ONCE,
    }
}
