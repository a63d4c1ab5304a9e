#!/bin/sh
# Makes what compose.yaml reads and no repository should hold: keys, a certificate, the password of Grafana.
# What is there stays. Put your own certificate into secrets/tls.crt and secrets/tls.key.
#   ./prepare.sh [NAME OF THE SERVER]
set -eu
cd "$(dirname "$0")"
name=${1:-localhost}
mkdir -p models secrets
# Containers read the files under other users than yours: the folder is closed, the files are not.
chmod 700 secrets
umask 022
if [ ! -e secrets/keys ]; then
    openssl rand -hex 24 | tr -d '\n' > secrets/metrics.key
    printf 'prometheus=%s\nalice=%s\n' "$(cat secrets/metrics.key)" "$(openssl rand -hex 24)" > secrets/keys
fi
if [ ! -e secrets/tls.key ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 90 -subj "/CN=$name" \
        -addext "subjectAltName=DNS:$name" -keyout secrets/tls.key -out secrets/tls.crt 2>/dev/null
    chmod 644 secrets/tls.key
fi
[ -e secrets/grafana.password ] || openssl rand -hex 12 | tr -d '\n' > secrets/grafana.password
echo "Keys of clients: $PWD/secrets/keys. Password of Grafana's admin: $PWD/secrets/grafana.password"
