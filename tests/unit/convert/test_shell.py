"""Scripts as the commands that they would run."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.convert import shell_parser
from anabatic.core.errors import AnabaticError, ConfigError

WORD = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=12)


def words(text: str) -> list[tuple[str, ...]]:
    return [one.words for one in shell_parser.parse_script(text)]


@given(st.lists(WORD, min_size=1, max_size=5))
def test_quoted_words_come_back(some: list[str]) -> None:
    first = ["program", *some]
    assert words(shlex.join(first)) == [tuple(first)]


@given(st.lists(st.lists(st.text("abc-=./", min_size=1, max_size=6), min_size=1, max_size=4), max_size=4))
def test_plain_commands_are_parted(commands: list[list[str]]) -> None:
    lines = [["run", *one] for one in commands]
    assert words("\n".join(" ".join(one) for one in lines)) == [tuple(one) for one in lines]
    assert words(" && ".join(" ".join(one) for one in lines)) == [tuple(one) for one in lines]


@given(st.text("ab $'\"\\\n#;&|<>(){}=`-", max_size=40))
def test_any_text_is_commands_or_an_error(text: str) -> None:
    try:
        found = shell_parser.parse_script(text)
    except AnabaticError as error:
        assert error.hint
    else:
        assert all(one.words and one.line >= 1 for one in found)


@pytest.mark.process
@pytest.mark.parametrize(
    "script",
    [
        'A="x y"\nprintf "[%s]" $A "$A" a\\ b',
        "A=(1 '2 3')\nA+=(4)\nprintf '[%s]' \"${A[@]}\"",
        "printf '[%s]' a#b \\\n  c # d\n",
        "printf '[%s]' ${NO_SUCH_NAME:-7} \"${NO_SUCH_NAME:-8 9}\" 'it''s' \"\\$x \\\\ \\a\"",
        "N=2\nprintf '[%s]' $(expr 16 / $N) $((100 * 5)) $((N+1)) $(( $N - 7 ))",
        "B=2; export B; if true; then printf '[%s]' -$B-; fi",
    ],
)
def test_words_are_bash_s(script: str) -> None:
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    (*_, command) = shell_parser.parse_script(script)
    assert "".join(f"[{word}]" for word in command.words[2:]) == done.stdout


def test_variables() -> None:
    script = "A=1\nexport B=2 C=$A\nD=4 run $A $E '$B'\nunset X\n"
    first, _ = shell_parser.parse_script(script)
    assert first.words == ("run", "1", "$E", "$B")
    assert first.variables == {"B": "2", "C": "1", "D": "4"}


def test_what_is_no_word() -> None:
    script = "run a > out 2>&1 <in &\ncat <<'END' | more\nswift sft --x 'torn\nEND\nlast $(date +%s | cut -c1) `x`\n"
    assert words(script) == [("run", "a"), ("cat",), ("more",), ("last", "$(date +%s | cut -c1)", "`x`")]


def test_lines_are_counted() -> None:
    assert [one.line for one in shell_parser.parse_script("# a\n\none \\\n two\n\nthree")] == [3, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb 'c", "line 2: the quote ' is never closed"),
        ('a "b\n', 'line 1: the quote " is never closed'),
        ("a $(b", r"line 1: the bracket \$\( is never closed"),
        ("A=(b", r"line 1: the bracket \( is never closed"),
        ("cat <<END\nx", "here-document that `END`"),
        ("cat <<END", "here-document that `END`"),
        ("A=ab\n" + 'A="$A$A"\n' * 40, "line 21: variables hold more than 4000000 characters"),
    ],
)
def test_torn(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shell_parser.parse_script(text)


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("A=$(hosts | head -n 1)\nrun --to $A x", ("run", "--to", "$(hosts | head -n 1)", "x")),
        ("A=`hosts -n 1`\nrun --to $A x", ("run", "--to", "`hosts -n 1`", "x")),
        ('A="-n $(count -l | wc) -m 2"\nrun $A', ("run", "-n", "$(count -l | wc)", "-m", "2")),
        ('A="-n ${HOSTS[0]} b"\nrun $A', ("run", "-n", "${HOSTS[0]}", "b")),
        ('A="$(echo ")" | cut -c 1)"\nrun $A', ("run", '$(echo ")" | cut -c 1)')),
        ("A=( $(hosts -n 1) )\nrun ${A[@]}", ("run", "$(hosts -n 1)")),
        ("N=$(expr 10000 + $(id -u))\nrun $N", ("run", "$(expr 10000 + $(id -u))")),
        ('read A B <<< "$(hosts)"\nrun $A', ("run", "$A")),
        ("cat <<< END\nrun a", ("run", "a")),
        ("for x in 1 2; do run $x; done", ("run", "$x")),
        ("case $1 in\n a) run b;;\nesac", ("run", "b")),
        ("if [[ $N -gt 1 ]]; then run $((N * 8)); fi", ("run", "$((N * 8))")),
        ("while read -r x; do run $x; done < list", ("run", "$x")),
    ],
)
def test_what_only_a_shell_knows_stays(script: str, last: tuple[str, ...]) -> None:
    assert next(found for found in reversed(words(script)) if found[0] == "run") == last
    assert "in" not in {word for found in words(script) for word in found}


@given(st.text("ab $(){}`", max_size=30))
def test_words_of_a_value_hold_all_of_it(value: str) -> None:
    found = shell_parser._split_words(value)
    assert "".join(value.split()) == "".join("".join(found).split())


def test_values_that_no_shell_takes_are_read_in_time() -> None:
    assert len(shell_parser._split_words("$(" * 50_000)) == 1
