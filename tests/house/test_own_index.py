"""The index of published components lists our own as their manifests say."""

import subprocess
import sys

from house import MEMBERS, ROOT


def test_the_index_is_up_to_date() -> None:
    script = ROOT / "scripts" / "own_index.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_component_of_ours_says_where_to_get_it() -> None:
    import twinkle
    from twinkle_registry.index import index_entries

    listed = {(entry.package, entry.kind, entry.name) for entry in index_entries()}
    ours = {member.name for member in MEMBERS}
    records = [record for record in twinkle.registry().records if record.name in ours and record.manifest]
    assert {(spec.dist, spec.kind, spec.name) for r in records for spec in r.manifest.components} <= listed
