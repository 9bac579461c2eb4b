# bash completion for bullpen
_bullpen() {
	local line current=${COMP_WORDS[COMP_CWORD]}
	[ "$current" != = ] || current= # of --flag=
	COMPREPLY=()
	while IFS= read -r line; do
		[[ $line != "$current"* ]] || COMPREPLY+=("${line%%$'\t'*}")
	done < <("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _bullpen bullpen
