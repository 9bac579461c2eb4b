# bash completion for bullpen
_bullpen() {
	local IFS=$'\n' current=${COMP_WORDS[COMP_CWORD]}
	[ "$current" != = ] || current= # of --flag=
	COMPREPLY=($(compgen -W "$("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1)" -- "$current"))
}
complete -o default -F _bullpen bullpen
