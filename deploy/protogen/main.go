// Command protogen generates the Go code of a protocol: go run . -dir DIR FILE.proto writes it
// beside the file, with services of gRPC, or with -connect those of Connect. It needs no installed
// protoc.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

func main() {
	dir := flag.String("dir", ".", "directory of the file")
	connect := flag.Bool("connect", false, "generate services of Connect")
	flag.Parse()
	const parameter = "paths=source_relative"
	service, serviceParameter := "protoc-gen-go-grpc", parameter
	if *connect {
		service, serviceParameter = "protoc-gen-connect-go", parameter+",package_suffix" // none: the same package
	}
	for _, plugin := range []struct{ tool, parameter string }{
		{"protoc-gen-go", parameter},
		{service, serviceParameter},
	} {
		if err := generate(plugin.tool, plugin.parameter, *dir, flag.Arg(0)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

// generate runs a plugin of protoc on a file that imports no others but those that come with protoc.
func generate(tool, parameter, dir, file string) error {
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{dir}}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	files, err := compiler.Compile(context.Background(), file)
	if err != nil {
		return fmt.Errorf("compile %s: %w", file, err)
	}
	var descriptors []*descriptorpb.FileDescriptorProto
	for i := range files[0].Imports().Len() {
		descriptors = append(descriptors, protoutil.ProtoFromFileDescriptor(files[0].Imports().Get(i)))
	}
	descriptors = append(descriptors, protoutil.ProtoFromFileDescriptor(files[0]))
	request, err := proto.Marshal(&pluginpb.CodeGeneratorRequest{
		FileToGenerate: []string{file},
		Parameter:      &parameter,
		ProtoFile:      descriptors,
	})
	if err != nil {
		return fmt.Errorf("encode request: %w", err)
	}
	cmd := exec.Command("go", "tool", tool)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(request), os.Stderr
	answer, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("run %s: %w", tool, err)
	}
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(answer, &response); err != nil {
		return fmt.Errorf("decode response of %s: %w", tool, err)
	}
	if response.Error != nil {
		return fmt.Errorf("%s: %s", tool, response.GetError())
	}
	for _, f := range response.GetFile() {
		if err := os.WriteFile(filepath.Join(dir, f.GetName()), []byte(f.GetContent()), 0o644); err != nil {
			return fmt.Errorf("write generated code: %w", err)
		}
	}
	return nil
}
