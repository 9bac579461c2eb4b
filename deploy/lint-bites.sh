#!/bin/bash
# Plants one breach of each import rule of .golangci.yml in a copy of the tree, and fails unless the linter finds them all.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
tar --exclude=./bin --exclude=./.git --exclude=./bullpen-data -cf - . | tar -xf - -C "$copy"
cd "$copy"

module=github.com/bullpen-run/bullpen
breaches=()
# breach RULE DIR IMPORT: an import of IMPORT by a package in DIR breaks RULE.
breach() {
	local package=$2/breach${#breaches[@]}
	breaches+=("$package $1 $3")
	mkdir -p "$package"
	printf '// Package breach breaks a rule.\npackage breach\n\nimport _ "%s"\n' "$3" >"$package/breach.go"
}
breach proto proto github.com/cenkalti/backoff/v4
for component in gateway agent scheduler worker storage webhook; do
	for other in gateway agent scheduler worker storage webhook cmd; do
		[ "$component" = "$other" ] || breach "$component" "$component" "$module/$other/any"
	done
done
breach console console $module/proto
breach client client $module/scheduler/any
breach client client github.com/nats-io/nats.go
breach bench bench $module/scheduler/any
breach guest guest $module/proto
breach guest-private worker $module/guest/process
breach guest-private cmd/internal $module/guest/account
breach guest-protocol worker connectrpc.com/connect
breach queue-technology gateway github.com/nats-io/nats.go
breach queue-technology cmd/internal github.com/hibiken/asynq
breach queue-technology webhook github.com/redis/go-redis/v9
breach queue-technology cmd/internal github.com/alicebob/miniredis/v2
breach object-store storage github.com/aws/aws-sdk-go-v2/aws
breach object-store storage/blob github.com/aws/smithy-go
breach object-store worker github.com/aws/aws-sdk-go-v2/service/s3
breach databases scheduler database/sql
breach databases storage github.com/jackc/pgx/v5
breach databases cmd/internal modernc.org/sqlite
breach processes gateway os/exec
breach processes scheduler golang.org/x/sys/unix
breach links gateway github.com/vishvananda/netlink
breach links cmd/bullpen github.com/vishvananda/netlink
breach networks webhook github.com/miekg/dns
breach networks cmd/internal github.com/google/nftables
breach networks scheduler gvisor.dev/gvisor/pkg/tcpip/stack
breach telemetry worker github.com/prometheus/client_golang/prometheus
breach telemetry gateway go.opentelemetry.io/otel/sdk/trace
breach telemetry gateway go.opentelemetry.io/otel/exporters/stdout/stdouttrace

# The breaches name packages that do not exist, which the linter reports as well and which does not matter here.
found=$(go tool -modfile=deploy/tools/go.mod golangci-lint run --enable-only=depguard ./... 2>&1) || true
found+=$(cd bench && go tool -modfile=../deploy/tools/go.mod golangci-lint run --enable-only=depguard ./... 2>&1) || true
missed=0
for b in "${breaches[@]}"; do
	read -r package rule import <<<"$b"
	if ! grep -F "$package/breach.go" <<<"$found" | grep -qF "import '$import' is not allowed from list '$rule'"; then
		echo "no rule finds that $package imports $import (expected: $rule)" >&2
		missed=$((missed + 1))
	fi
done
echo "$((${#breaches[@]} - missed)) of ${#breaches[@]} breaches were found"
[ "$missed" = 0 ] || { echo "$found" | tail -20 >&2; exit 1; }
