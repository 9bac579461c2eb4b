#!/bin/bash
# Installs the Debian package on this machine, starts its units, and kills, restarts and stops them while programs run. For a virtual machine that
# deploy/test-units.sh boots: it changes the machine, and leaves bullpen installed if a check fails.
set -Eeuo pipefail
trap 'echo "FAILED in line $LINENO: $BASH_COMMAND"; journalctl --no-pager --output=short-monotonic --lines=150' ERR
export PATH=$PATH:$PWD/bin BULLPEN_URL=http://127.0.0.1:8080 LANG=C.UTF-8
roles='bullpen-gateway bullpen-scheduler bullpen-webhook bullpen-worker'
hook=http://127.0.0.1:8099/hook

eventually() {
	local end=$((SECONDS + 300))
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $end ] || { echo "not within 5 minutes: $*"; return 1; }
		sleep 1
	done
}
ready() { curl -fs "$BULLPEN_URL/readyz"; }
active() { [ "$(systemctl show -P ActiveState "$1")" = active ]; }

# submit prints the id of an execution of a program that takes SECONDS, and starts again if its worker is killed.
submit() {
	curl -fsS "$BULLPEN_URL/v1/sandbox/execute" -H "Authorization: Bearer $BULLPEN_API_KEY" -H 'Prefer: respond-async' -d '{
		"code": "import time; time.sleep('"$1"'); print(\"slept\")", "max_attempts": 5, "webhook_url": "'$hook'"}' |
		sed 's/.*"trace_id":"\([^"]*\)".*/\1/'
}
has_status() { bullpen get --json "$1" | grep -qE "\"status\": ?\"$2\""; }
slept() { [ "$(bullpen logs "$1")" = slept ]; }
delivered() { grep -q "$1" /run/hook; }

# run_languages runs a program in each language.
run_languages() {
	test "$(echo 'print(6 * 7)' | bullpen run -q -)" = 42
	test "$(echo 'console.log(6 * 7)' | bullpen run -q -l node -)" = 42
	test "$(echo 'echo $((6 * 7))' | bullpen run -q -l bash -)" = 42
	test "$(echo 'puts 6 * 7' | bullpen run -q -l ruby -)" = 42
	test "$(echo 'console.log(6 * 7)' | bullpen run -q -l deno -)" = 42
	echo 'x = bytearray(1 << 40)' | bullpen run -q - && return 1 # a failure of the program is seen
	test "$(echo 'open("f", "w").write("kept")' | bullpen run -q --thread t1 - && echo 'print(open("f").read())' | bullpen run -q --thread t1 -)" = kept
}

# interrupt UNIT COMMAND...: runs the command while programs run. No result and no webhook is lost, and the unit is active again.
interrupt() {
	local unit=$1 traces trace pid
	shift
	echo "== $*"
	pid=$(systemctl show -P MainPID "$unit")
	traces=$(for _ in 1 2 3; do submit 8; done)
	eventually has_status "${traces%%$'\n'*}" running
	"$@"
	eventually active "$unit"
	eventually ready
	test "$(systemctl show -P MainPID "$unit")" != "$pid"
	for trace in $traces; do
		eventually has_status "$trace" success
		slept "$trace"
		eventually delivered "$trace"
	done
}

# check_units UNIT...: the units are enabled and run. The last runs programs.
check_units() {
	local unit trace
	eventually ready
	for unit; do
		active "$unit"
	done
	run_languages
	trace=$(submit 0)
	eventually delivered "$trace"
	for unit; do
		interrupt "$unit" systemctl restart "$unit"
		interrupt "$unit" systemctl kill --signal=KILL --kill-whom=main "$unit"
	done
	echo "== systemctl stop $unit"
	trace=$(submit 8)
	eventually has_status "$trace" running
	systemctl stop "$unit"
	test "$(systemctl show -P Result "$unit")" = success
	systemctl start "$unit"
	eventually ready
	has_status "$trace" success # it ended before the unit did
	bullpen get "$trace"
	test ! -e /run/user/nsjail.0.root/bin || return 1
}

# check_journal SECRET...: the log has no secrets, and no errors.
check_journal() {
	local secret
	journalctl --no-pager --output=cat --unit='bullpen*' >/run/journal
	for secret; do
		if grep -F "$secret" /run/journal; then return 1; fi
	done
	grep -E 'level=(WARN|ERROR)|"level":"(WARN|ERROR)"|panic|denied|not permitted' /run/journal | cut -c1-400 || true
}

echo '== install'
dpkg -i bullpen.deb
test -z "$(find /etc/systemd/system -name 'bullpen*')" # nothing is enabled
systemd-analyze verify /usr/lib/systemd/system/bullpen*.service
cat >/etc/bullpen/bullpen.env <<-'ENV'
	BULLPEN_WEBHOOK_ALLOW_HTTP=yes
	BULLPEN_WEBHOOK_ALLOW_CIDRS=127.0.0.0/8
	BULLPEN_WEBHOOK_ALLOW_PORTS=8099
ENV
install -m 755 bin/deno /usr/local/bin
systemd-run --quiet --unit=hook --property=StandardOutput=file:/run/hook "$(command -v bullpen)" webhook listen --json

echo '== bullpen'
systemctl enable --now bullpen
eventually test -s /var/lib/bullpen/server/bootstrap.key
BULLPEN_API_KEY=$(cat /var/lib/bullpen/server/bootstrap.key)
export BULLPEN_API_KEY
check_units bullpen
systemd-analyze security --no-pager bullpen | tail -1
check_journal "$BULLPEN_API_KEY"
systemctl disable --now bullpen
find /var/lib/bullpen /run/bullpen /var/cache/bullpen -maxdepth 2 -printf '%m %u:%g %p\n'

echo '== roles'
secret=$(head -c 20 /dev/urandom | base64)
mkdir -p /srv/buckets/bullpen
systemd-run --quiet --unit=nats "$PWD/bin/nats-server" --jetstream --store_dir=/srv/nats --addr=127.0.0.1
systemd-run --quiet --unit=s3 "$PWD/bin/versitygw" --port=127.0.0.1:7070 --region=us-east-1 --access=bullpen --secret="$secret" posix /srv/buckets
age-keygen -o /etc/bullpen/secrets.key 2>/dev/null
chown root:bullpen /etc/bullpen/secrets.key
chmod 640 /etc/bullpen/secrets.key
BULLPEN_API_KEY=sk-local-$(head -c 30 /dev/urandom | base64 | tr '+/' 'ab')
cat >>/etc/bullpen/bullpen.env <<-ENV
	BULLPEN_NATS=nats://127.0.0.1:4222
	BULLPEN_STORE=s3://bullpen?endpoint=http://127.0.0.1:7070&region=us-east-1&path_style=1
	AWS_ACCESS_KEY_ID=bullpen
	AWS_SECRET_ACCESS_KEY=$secret
	BULLPEN_SECRETS_KEY=/etc/bullpen/secrets.key
	BULLPEN_BOOTSTRAP_KEY=$BULLPEN_API_KEY
ENV
systemctl enable --now $roles
check_units $roles
for unit in $roles; do
	systemd-analyze security --no-pager "$unit" | tail -1
done
check_journal "$BULLPEN_API_KEY" "$secret" "$(grep -o 'AGE-SECRET.*' /etc/bullpen/secrets.key)"
find /var/lib/bullpen /run/bullpen /var/cache/bullpen -maxdepth 2 -printf '%m %u:%g %p\n'

echo '== remove'
dpkg -r bullpen
for unit in $roles; do
	test "$(systemctl show -P ActiveState "$unit")" = inactive
done
test -e /etc/bullpen/bullpen.env
dpkg -P bullpen
test ! -e /etc/bullpen/worker.env
find /etc/bullpen /var/lib/bullpen /run/bullpen /var/cache/bullpen -maxdepth 2 -printf '%m %u:%g %p\n' || true
find /etc/systemd/system -name 'bullpen*'
