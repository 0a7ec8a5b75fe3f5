"""The filter for secrets: a table of forms that must go, and of look-alikes that must stay."""

from __future__ import annotations

import json
import time

from rigs.tables import each_row

from contracts.redaction import redact, without_secrets

# Built from parts, so that no scanner of this repository takes them for real ones.
MIXED = "aB3" + "dE5fG7hJ9k" * 4
FORMS = {
    "openai": "sk-" + MIXED, "openai project": "sk-proj-" + MIXED, "gitlab": "glpat-" + MIXED[:20],
    "slack": "xoxb-" + "1234567890-" + MIXED[:12], "npm": "npm_" + MIXED[:36], "google": "AIza" + MIXED[:35],
    "github": "ghp_" + MIXED[:36], "fine-grained": "github_pat_" + MIXED[:30], "hub": "hf_" + MIXED[:34],
    "aws": "AKIA" + "Z" * 16, "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "docker": "dckr_pat_" + MIXED[:24], "nvidia": "nvapi-" + MIXED, "stripe": "sk_live_" + MIXED[:24],
}  # fmt: skip
S = "hunter2hunter2"
TEXTS = [
    f"API_TOKEN={S}", f"password: {S}", f'"passphrase": "{S} and more"', f"export WANDB_API_KEY='{S}'",
    f"--password {S}", f"mysql --password={S} db", f"tool --api-key {S} --verbose", f"--hf-token\t{S}",
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={S}==;EndpointSuffix=x", f"https://a/b?sv=1&sig={S}%3D",
    f'{{"auths": {{"r": {{"auth": "{S}"}}}}}}', f"_auth={S}", f"//npm.example/:_authToken={S}",
    f"Cookie: session={S}; other={S}x", f"Set-Cookie: id={S}; HttpOnly", f"Authorization: token {S}",
    f"-H 'Authorization: {S} {S}'", f'"Cookie": "{S}"', f"Proxy-Authorization: Basic {S}=",
    f"curl -u bob:{S} https://x", f"https://bob:{S}@proxy:3128/", f"url=https://x/?a=1&password={S}",
    f"log_line: msg=failed access_key={S}", f"aws_secret_access_key = {S}", f"password: |\n  {S}\n",
    f"- name: WANDB_API_KEY\n  value: {S}\n", f'{{"name":"MY_SECRET","value":"{S}"}}',
    f'annotation: "{{\\"name\\":\\"DB_PASSWORD\\",\\"value\\":\\"{S}\\"}}"', f"bearer {S}", f"client_secret={S}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{S}\n-----END OPENSSH PRIVATE KEY-----", f"x-api-key: {S}",
    f"PGPASSWORD={S}", f"secret_id={S}", f"SharedAccessKey={S}", f"pwd={S}", f"api_tokens: {S}",
    f"token_file=/a?password={S}", f"passwd:{S}", f"credentials={S}",
]  # fmt: skip
HARMLESS = [
    "max_new_tokens=128", "tokens: 4096", "tokens_per_second: 1.2e5", "tokens/s: 1234.5", "--tokens 1e9",
    "--tokens 3B", "tokenizer: meta-llama/x", "--tokenizer gpt2", "eos_token: </s>", "pad_token_id: 0",
    "special_tokens: <pad>", "token_file: /var/run/token", "--token-file /etc/tokens", "HF_TOKEN_PATH=/root/.cache",
    "secretName: registry", "secretKeyRef: {name: a, key: b}", "authorization-mode=Node,RBAC", "auth: required",
    "authentication: webhook", "author: someone", "password: null", "password=${DB_PASSWORD}", "HF_TOKEN=$HF_TOKEN",
    'token: "{{ .Values.x }}"', "passed=8 bypass=1 compass=2", "key: value", "private_key_file=/etc/ssl/k.pem",
    "NCCL_DEBUG=INFO", "monkey=1", "a bearer token is required", "basic authentication", "risk-free-rate-of-one",
    "sk-learn-is-a-library-name-of-some-length", "npm_config_cache=/tmp", "hf_hub_download_some_file", "xoxb", "ghp_",
    "https://host:8080/path", "git@host:repo", "token: (left out)", "[rank0] step 3 loss 2.5 tokens 4096",
    "cookiecutter: x", "GPU-1b2c3d4e-aaaa-bbbb-cccc-0123456789ab", "sha256:" + "ab12" * 16, "signature: valid",
    "Unauthorized: the token names no node", "--token-review --publish", "token_type: bearer", "secret_type: Opaque",
    "authorization:\n  mode: Webhook", "password:\n  secretKeyRef: x", "--secret-count 3", "AIza",
    "as Authorization: Bearer TOKEN", "Authorization: Bearer $TOKEN", "Authorization: Basic <token>",
]  # fmt: skip


def test_every_form_of_a_secret_is_left_out_and_look_alikes_stay() -> None:
    rows = [(text, S) for text in TEXTS] + [(f"a line with {form} in it", form) for form in FORMS.values()]
    leaked = [text for text, secret in rows
              if secret in redact(text) or secret in json.dumps(without_secrets({"log": [text]}))]  # fmt: skip
    changed = [(text, redact(text)) for text in HARMLESS if redact(text) != text]
    assert not leaked, leaked
    assert not changed, changed
    assert [text for text in TEXTS if redact(redact(text)) != redact(text)] == []


def test_names_count_for_the_values_beside_them() -> None:
    """Members of a mapping, variables of a manifest, options in a list of arguments; numbers and the rest stay."""
    document = {
        "passphrase": S, "auth": S, "cookie": S, "nested": [{"access_key": S}], "max_tokens": 8, "token": None,
        "args": ["--password", S, "--steps", "8"], "secretName": "registry",
        "env": [{"name": "HF_TOKEN", "value": S}, {"name": "NCCL_DEBUG", "value": "INFO"}],
        "valueFrom": {"secretKeyRef": {"name": "a", "key": "token"}},
    }  # fmt: skip
    made = without_secrets(document)
    assert S not in json.dumps(made)
    for name in ("max_tokens", "token", "secretName", "valueFrom"):
        assert made[name] == document[name], name
    assert made["args"][2:] == ["--steps", "8"] and made["env"][1] == {"name": "NCCL_DEBUG", "value": "INFO"}


@each_row("part", ["a", "=", "a=", '"', "-", "name:", "token", 'password="', "x ", "eyJ", "a://", "\\",
                                  "authorization:", "-u a", "-a ", "name: x\n"])  # fmt: skip
def test_no_text_takes_long(part: str) -> None:
    """Time grows with the length, not with its square: ten times the text takes far less than a hundred times."""
    times = []
    for letters in (5_000, 50_000):
        text = part * (letters // len(part))
        began = time.process_time()
        redact(text)
        times.append(time.process_time() - began)
    assert times[1] < 40 * max(times[0], 0.005), times
