#!/bin/bash
# Installs bullpen.deb on this machine, starts its units, and kills, restarts, upgrades and stops them while programs run: no result and no webhook
# may be lost. For the virtual machine that deploy/test-units.sh boots, since it changes the machine.
set -Eeuo pipefail
trap 'echo "FAILED in line $LINENO: $BASH_COMMAND"; journalctl --no-pager --output=short-monotonic --identifier=bullpen --identifier=systemd --lines=200' ERR
export PATH=$PATH:$PWD/bin BULLPEN_URL=http://127.0.0.1:8080 LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive
roles='bullpen-gateway bullpen-scheduler bullpen-webhook bullpen-worker'

# A machine whose processor is emulated needs minutes for what others do in seconds.
eventually() {
	local end=$((SECONDS + 600))
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $end ] || { echo "not within 10 minutes: $*"; return 1; }
		sleep 1
	done
}
ready() { curl -fs "$BULLPEN_URL/readyz"; }
active() { test "$(systemctl show -P ActiveState "$1")" = active; }
replaced() { active "$1" && test "$(systemctl show -P MainPID "$1")" != "$2"; }
has_status() { bullpen get --json "$1" | grep -q '"status":"'"$2"; }
delivered() { grep -q "$1" /run/hook; }

# submit LANGUAGE CODE [FIELDS] prints the id of an execution, whose program starts again if its worker dies.
submit() {
	curl -fsS "$BULLPEN_URL/v1/sandbox/execute" -H "Authorization: Bearer $BULLPEN_API_KEY" -H 'Prefer: respond-async' -d "{
		\"language\": \"$1\", \"code\": \"$2\", \"max_attempts\": 10, \"webhook_url\": \"http://127.0.0.1:8099/\"${3:+, $3}}" |
		sed 's/.*"trace_id":"\([^"]*\)".*/\1/'
}

# completed TRACE OUTPUT: the program succeeds, and its webhook is delivered.
completed() {
	eventually has_status "$1" success
	test "$(bullpen logs "$1")" = "$2"
	eventually delivered "$1"
}
prints() { completed "$(submit "$2" "$3" "${4:-}")" "$1"; }

run_languages() {
	prints 42 python 'print(6 * 7)'
	prints 42 node 'console.log(6 * 7)'
	prints 42 bash 'echo $((6 * 7))'
	prints 42 ruby 'puts 6 * 7'
	prints 42 deno 'console.log(6 * 7)'
	eventually has_status "$(submit python "x = [b'x' * (1 << 20) for _ in range(1 << 14)]")" oom
}

run_thread() {
	prints '' python "open('file', 'w').write('kept')" '"thread_id": "notes"'
	prints kept python "print(open('file').read())" '"thread_id": "notes"'
}

# interrupt UNIT COMMAND...: the command, which replaces the unit's process, while programs run
interrupt() {
	local unit=$1 pid traces trace
	shift
	echo "== $*"
	pid=$(systemctl show -P MainPID "$unit")
	traces=$(for _ in 1 2 3; do submit python "import time; time.sleep(10); print('slept')"; done)
	eventually has_status "${traces%%$'\n'*}" running
	"$@"
	eventually replaced "$unit" "$pid"
	eventually ready
	for trace in $traces; do
		completed "$trace" slept
	done
}

# check_units UNIT...: the last has the worker.
check_units() {
	local unit trace
	systemctl enable --now "$@"
	eventually ready
	run_languages
	for unit; do
		interrupt "$unit" systemctl restart "$unit"
		interrupt "$unit" systemctl kill --signal=KILL --kill-whom=main "$unit"
	done
	interrupt "$unit" dpkg -i bullpen.deb # as an upgrade
	echo "== systemctl stop $unit"
	trace=$(submit python "import time; time.sleep(10); print('slept')")
	eventually has_status "$trace" running
	systemctl stop "$unit"
	test "$(systemctl show -P Result "$unit")" = success
	systemctl start "$unit"
	eventually ready
	completed "$trace" slept
	bullpen get --json "$trace" | grep -q '"attempt":1,' # it ended before its worker did
	for unit; do
		active "$unit"
		systemd-analyze security --no-pager "$unit" | tail -1
	done
}

# check_journal SECRET...: the secrets are not in the log, and neither are errors.
check_journal() {
	local secret
	journalctl --no-pager --output=cat --identifier=bullpen >/run/journal
	for secret; do
		if grep -F -- "$secret" /run/journal; then return 1; fi
	done
	if grep -E 'level=ERROR|^panic:|^fatal error:' /run/journal; then return 1; fi
}

echo '== dpkg -i'
dpkg -i bullpen.deb
test -z "$(find /etc/systemd/system -name 'bullpen*')" # nothing is enabled
systemd-analyze verify /usr/lib/systemd/system/bullpen*.service
install bin/deno /usr/local/bin
cat >/etc/bullpen/bullpen.env <<-'ENV'
	BULLPEN_WEBHOOK_ALLOW_HTTP=yes
	BULLPEN_WEBHOOK_ALLOW_CIDRS=127.0.0.0/8
	BULLPEN_WEBHOOK_ALLOW_PORTS=8099
ENV
systemd-run --quiet --unit=hook --property=StandardOutput=file:/run/hook "$(command -v bullpen)" webhook listen --json

echo '== a server in one process'
systemctl start bullpen
eventually test -s /var/lib/bullpen/server/bootstrap.key
BULLPEN_API_KEY=$(cat /var/lib/bullpen/server/bootstrap.key)
export BULLPEN_API_KEY
check_units bullpen
run_thread
systemctl disable --now bullpen
check_journal "$BULLPEN_API_KEY" "$(grep -o 'AGE-SECRET.*' /var/lib/bullpen/server/secrets.key)"

echo '== a process for each role'
secret=$(head -c 30 /dev/urandom | base64 | tr '+/' 'ab')
export BULLPEN_API_KEY=sk-local-$(head -c 30 /dev/urandom | base64 | tr '+/' 'ab')
mkdir -p /srv/buckets/bullpen
systemd-run --quiet --unit=nats bin/nats-server --jetstream --store_dir=/srv/nats --addr=127.0.0.1
systemd-run --quiet --unit=s3 bin/versitygw --port=127.0.0.1:7070 --region=us-east-1 --access=bullpen --secret="$secret" posix /srv/buckets
for key in secrets store; do
	age-keygen -o /etc/bullpen/$key.key 2>/dev/null
	chown root:bullpen /etc/bullpen/$key.key
	chmod 640 /etc/bullpen/$key.key
done
cat >>/etc/bullpen/bullpen.env <<-ENV
	BULLPEN_NATS=nats://127.0.0.1:4222
	BULLPEN_STORE=s3://bullpen?endpoint=http://127.0.0.1:7070&region=us-east-1&path_style=1
	BULLPEN_STORE_KEY=/etc/bullpen/store.key
	AWS_ACCESS_KEY_ID=bullpen
	AWS_SECRET_ACCESS_KEY=$secret
	BULLPEN_SECRETS_KEY=/etc/bullpen/secrets.key
	BULLPEN_BOOTSTRAP_KEY=$BULLPEN_API_KEY
ENV
check_units $roles

echo '== a unit that cannot start'
cp /etc/bullpen/webhook.env .
echo BULLPEN_LISTEN=203.0.113.1:80 >/etc/bullpen/webhook.env
systemctl restart bullpen-webhook
restarted() { test "$(systemctl show -P NRestarts bullpen-webhook)" -gt 6; }
eventually restarted
cp webhook.env /etc/bullpen
prints 42 python 'print(6 * 7)'

echo '== directories and threads'
useradd --system data
mkdir /srv/shared
mount -t tmpfs -o "nosuid,mode=755,uid=$(id -u data),gid=$(id -g data)" tmpfs /srv/shared
echo BULLPEN_MOUNT_ROOTS=/srv/shared >>/etc/bullpen/bullpen.env
mkdir -p /etc/systemd/system/bullpen-{gateway,worker}.service.d
sed -n '1i [Service]
	s/^#\(Cap\|Read\)/\1/p' /usr/lib/systemd/system/bullpen-worker.service >/etc/systemd/system/bullpen-worker.service.d/mounts.conf
for variant in directories-1 directories-2; do
	cp $variant.conf /etc/systemd/system/bullpen-gateway.service.d/directories.conf
	systemctl daemon-reload
	systemctl restart bullpen-gateway bullpen-worker
	eventually ready
	if [ $variant = directories-1 ]; then
		bullpen connection create shared --org default --kind directory --directory /srv/shared
		key=$(bullpen key create --name files --org default --mount shared)
	fi
	echo $variant >file
	BULLPEN_API_KEY=$key bullpen files cp file "volume:shared/$variant"
	BULLPEN_API_KEY=$key prints $variant python "print(open('/data/shared/$variant').read()); open('/data/shared/$variant', 'a').write('more')"
	test "$(BULLPEN_API_KEY=$key bullpen files cp "volume:shared/$variant" -)" = "$(printf '%s\nmore' $variant)"
	test "$(stat --format='%U %a' "/srv/shared/$variant")" = 'data 644'
done
run_thread
check_journal "$BULLPEN_API_KEY" "$key" "$secret" "$(grep -o 'AGE-SECRET.*' /etc/bullpen/secrets.key)" "$(grep -o 'AGE-SECRET.*' /etc/bullpen/store.key)"

echo '== dpkg --remove, dpkg --purge'
(cd /var/lib/bullpen && stat --format='%n %U %a' *) | diff - <(printf '%s\n' 'gateway root 700' 'scheduler bullpen 700' 'server root 700' 'webhook bullpen 700' 'worker root 700')
dpkg --remove bullpen
for unit in $roles; do
	test "$(systemctl show -P ActiveState "$unit")" = inactive
done
test -z "$(find /etc/systemd/system -type l -name 'bullpen*')"
test -e /etc/bullpen/bullpen.env
test -e /var/cache/bullpen
dpkg --purge bullpen
test "$(ls /etc/bullpen)" = $'secrets.key\nstore.key'
test ! -e /var/cache/bullpen
test -e /var/lib/bullpen/server/bootstrap.key
