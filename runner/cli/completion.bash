_runner_complete() {
    local line="${COMP_LINE:0:$COMP_POINT}" command="${COMP_LINE%% *}"
    case "$line" in
        *python*" -m runner "*) command="$command -m runner"; line="runner ${line#* -m runner }" ;;
        *python*) return ;;
        *) line="runner ${line#* }" ;;
    esac
    COMPREPLY=($(compgen -W "$(COMP_LINE="$line" COMP_POINT=${#line} eval "$command" -sc query=bash 2> /dev/null)" -- "${line##* }"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _runner_complete runner python python3
