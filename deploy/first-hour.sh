#!/bin/bash
# Does what the README shows to a newcomer, in a fresh clone of this tree as it is, and prints how long each command takes:
# from nothing to a first plot. Arguments are more flags for bullpen init, such as --stale-index. Caches of Go, pip and npm
# are those of this machine; images are built from nothing. Needs root and a network.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

work=$(mktemp -d)
server=
finish() {
	if [ -n "$server" ]; then
		kill -- "-$server" 2>/dev/null || true
		wait "$server" || true
	fi
	rm -rf "$work"
}
trap finish EXIT

GOCACHE=$(go env GOCACHE) GOMODCACHE=$(go env GOMODCACHE)
export GOCACHE GOMODCACHE XDG_CACHE_HOME="$work/cache" # which bullpen image build uses
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export BULLPEN_LISTEN=127.0.0.1:$port BULLPEN_URL=http://127.0.0.1:$port
unset BULLPEN_API_KEY
command -v sudo >/dev/null || sudo() { "$@"; }

total=0
timed() { # timed NAME COMMAND…
	local name=$1 began=$EPOCHREALTIME took
	shift
	"$@"
	took=$(((${EPOCHREALTIME/./} - ${began/./}) / 100000))
	total=$((total + took))
	printf '%6d.%d s  %s\n' $((took / 10)) $((took % 10)) "$name" >>"$work/times"
}

clone() { # a clone with the changes that are not committed
	git clone -q "$root" "$work/bullpen"
	git -C "$root" diff HEAD --binary >"$work/changes"
	[ ! -s "$work/changes" ] || git -C "$work/bullpen" apply "$work/changes"
	git -C "$root" ls-files -z --others --exclude-standard | (cd "$root" && xargs -0r cp --parents -t "$work/bullpen")
}
serve() { # make serve, in another terminal
	set -m
	(exec make serve) >"$work/serve.log" 2>&1 &
	server=$!
	set +m
	until curl -sf "$BULLPEN_URL/readyz" >/dev/null; do
		kill -0 "$server" 2>/dev/null || { cat "$work/serve.log" >&2; exit 1; }
		sleep 0.2
	done
}

timed 'git clone' clone
cd "$work/bullpen"
mapfile -t commands < <(awk '/^<!-- first-hour.sh -->$/ { found = 1 } found && /^```$/ { if (inside++) exit; next } inside' README.md)
[ "${#commands[@]}" = 5 ] || { echo "first-hour.sh: README.md has ${#commands[@]} commands of the first hour, not 5" >&2; exit 1; }
for command in "${commands[@]}"; do
	grep -qxF -- "$command" docs/tutorials/first-agent.md || { echo "first-agent.md does not have: $command" >&2; exit 1; }
done
for command in "${commands[@]}"; do
	case $command in
	'make serve'*) timed "$command" serve ;;
	*'bullpen init --data'*) timed "$command" eval "${command/init --data/init --data $*}" ;;
	*) timed "$command" eval "$command" ;;
	esac
done
# An empty result of bullpen init would leave the administrator's key.
[ "$BULLPEN_API_KEY" != "$(cat bullpen-data/bootstrap.key)" ] || { echo "first-hour.sh: bullpen init made no key" >&2; exit 1; }
[ "$(head -c 8 result-1.png | od -An -tx1 | tr -d ' ')" = 89504e470d0a1a0a ] || { echo "first-hour.sh: result-1.png is not a PNG" >&2; exit 1; }
printf '%6d.%d s  in total, to a plot of %d bytes\n' $((total / 10)) $((total % 10)) "$(stat -c %s result-1.png)" >>"$work/times"
cat "$work/times"
