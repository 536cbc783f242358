function _runner_complete
    set -lx COMP_LINE (commandline -cp)
    set -l command runner
    if string match -q '* -m runner *' -- $COMP_LINE
        set command (string split ' ' -- $COMP_LINE)[1] -m runner
        set COMP_LINE (string replace -r '^.* -m runner ' 'runner ' -- $COMP_LINE)
    end
    $command -sc query=fish
end
complete -c runner -x -a '(_runner_complete)'
for name in python python3
    complete -c $name -n 'string match -q "* -m runner *" -- (commandline -cp)' -x -a '(_runner_complete)'
end
