#!/bin/bash
# Checks the manifests of the chart against Kubernetes' schemas, and against the definitions of KEDA and of the Prometheus operator, which come from
# their Go modules.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A module's path, version, and the definition in it.
definition() {
	dir=$(go mod download -json "$1@$2" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
	cp "$dir/$3" "$work"
}
definition github.com/kedacore/keda/v2 v2.21.0 config/crd/bases/keda.sh_scaledobjects.yaml
definition github.com/prometheus-operator/prometheus-operator v0.85.0 example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml
go build -o "$work/kubectl-validate" sigs.k8s.io/kubectl-validate
"$work/kubectl-validate" --version 1.30 --local-crds "$work" ../helm/rendered ../kubernetes
