module github.com/bullpen-run/bullpen/deploy/container

go 1.26.3

require github.com/google/go-containerregistry v0.22.1 // indirect
