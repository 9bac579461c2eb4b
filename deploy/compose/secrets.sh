#!/bin/bash
# Writes the passwords of compose.yaml to .env, and the key of secrets to secrets/secrets.key. Needs age-keygen; as root, so that the key is
# readable by the group of the gateways alone. With rootless Docker or user namespaces, give it that group as it is outside.
set -euo pipefail
cd "$(dirname "$0")"
[ ! -e .env ] || { echo "secrets.sh: .env exists: what is running uses it" >&2; exit 1; }
command -v age-keygen >/dev/null || { echo "secrets.sh: age-keygen is missing: apt-get install age" >&2; exit 1; }
umask 077
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
mkdir -p secrets
age-keygen -o secrets/secrets.key
chown root:65532 secrets/secrets.key
chmod 640 secrets/secrets.key # and the directory keeps out other users of this machine
# The p: nats.conf would take digits alone for a number.
cat >.env <<EOF
BOOTSTRAP_KEY=sk-local-$(random)
NATS_PASSWORD=p$(random)
REDIS_PASSWORD=$(random)
S3_SECRET=$(random)
GRAFANA_PASSWORD=$(random)
EOF
echo "The first API key is BOOTSTRAP_KEY in $PWD/.env"
