"""`flopwatch token`."""

import json
from pathlib import Path
from typing import Any

from app.tokens import id_of


def test_a_token_is_made_listed_and_revoked(serve: Any, flopwatch: Any, tmp_path: Path) -> None:
    with serve(tmp_path, api_token="bootstrap") as site:

        def run(*arguments: str, token: str = "bootstrap", code: int = 0) -> Any:
            done = flopwatch("token", *arguments, FLOPWATCH_URL=site.url, FLOPWATCH_API_TOKEN=token)
            assert done.returncode == code, done.stderr
            return done

        made = run("create", "ada", "--scope", "submit", "--expires", "2w")
        token = made.stdout.strip()
        token_id = id_of(token)
        assert token not in made.stderr
        assert f"`flopwatch token revoke {token_id}` ends it" in made.stderr
        forever = json.loads(run("create", "ci", "--scope", "read", "--expires", "never", "--json").stdout)
        listed = run("list").stdout
        assert [line.split()[:3] for line in listed.splitlines()[1:]] == [
            [token_id, "ada", "submit"],
            [forever["id"], "ci", "read"],
        ]
        assert token not in listed
        assert "scope `admin`" in run("list", token=token, code=1).stderr
        run("revoke", token_id)
        assert [one["name"] for one in json.loads(run("list", "--json").stdout)] == ["ci"]
        assert "12h, 90d, 2w or never" in run("create", "ada", "--scope", "read", "--expires", "soon", code=2).stderr
