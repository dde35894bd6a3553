//! Runs every shell block of the guides and compares the output.
//!
//! A block is marked `console`. Lines that start with `$ ` are commands (`> ` continues one), the
//! lines below are the expected output. `…` matches any text within a line, or, alone on a line, any
//! number of lines. After a command that fails, the guide runs `echo $?`. Each guide has its own
//! home directory. `ZAEL_UPDATE_GUIDES=1 cargo test -p zae-limiter-cli --test guides` updates the
//! output in the guides.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A command of a guide and its expected output.
#[derive(Debug, Default)]
struct Step {
    line: usize,
    command: String,
    printed: Vec<String>,
}

/// A piece of a guide.
enum Piece {
    Text(String),
    Step(Step),
}

fn pieces(guide: &str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut in_console = false;
    for (at, line) in guide.lines().enumerate() {
        if line.starts_with("```") {
            in_console = line == "```console";
            let shell = ["```sh", "```bash", "```shell", "```zsh"].contains(&line);
            assert!(!shell, "line {}: mark shell blocks `console`, so that they are run", at + 1);
            pieces.push(Piece::Text(line.to_owned()));
        } else if !in_console {
            pieces.push(Piece::Text(line.to_owned()));
        } else if let Some(command) = line.strip_prefix("$ ") {
            let command = command.to_owned();
            pieces.push(Piece::Step(Step { line: at + 1, command, printed: Vec::new() }));
        } else if let Some(Piece::Step(step)) = pieces.last_mut() {
            match line.strip_prefix("> ") {
                Some(more) if step.printed.is_empty() => {
                    step.command = format!("{}\n{more}", step.command);
                }
                _ => step.printed.push(line.to_owned()),
            }
        } else {
            panic!("line {}: a console block starts with a command", at + 1);
        }
    }
    pieces
}

/// Runs the commands of one guide.
struct Reader {
    home: TempDir,
    last_status: i32,
}

impl Reader {
    fn new() -> Self {
        Self { home: tempfile::tempdir().unwrap(), last_status: 0 }
    }

    /// Runs a command and returns its output on both streams.
    fn run(&mut self, command: &str) -> Vec<String> {
        let binary = Path::new(env!("CARGO_BIN_EXE_zae-limiter"));
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("bash")
            .arg("-c")
            .arg(format!("exec 2>&1\n(exit {})\n{command}", self.last_status))
            .current_dir(self.home.path())
            .env_clear()
            .env("HOME", self.home.path())
            .env("PATH", format!("{}:{path}", binary.parent().unwrap().display()))
            .env("USER", "ada")
            .output()
            .unwrap();
        self.last_status = output.status.code().unwrap_or(-1);
        let printed = String::from_utf8(output.stdout).unwrap();
        let printed = printed.replace(&*self.home.path().to_string_lossy(), "/home/ada");
        printed.lines().map(|line| line.trim_end().to_owned()).collect()
    }
}

/// Whether a line matches the guide's line, in which `…` matches anything.
fn line_matches(said: &str, line: &str) -> bool {
    let mut pieces = said.split('…');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let mut pieces: Vec<&str> = pieces.collect();
    let Some(last) = pieces.pop() else { return rest.is_empty() };
    for piece in pieces {
        let Some(found) = rest.find(piece) else { return false };
        rest = &rest[found + piece.len()..];
    }
    rest.ends_with(last)
}

fn matches(said: &[String], printed: &[String]) -> bool {
    match said.split_first() {
        None => printed.is_empty(),
        Some((first, said)) if first == "…" => {
            (0..=printed.len()).any(|skipped| matches(said, &printed[skipped..]))
        }
        Some((first, said)) => match printed.split_first() {
            Some((line, printed)) => line_matches(first, line) && matches(said, printed),
            None => false,
        },
    }
}

/// Runs a guide. Returns it with the current output, and the differences.
fn follow(path: &Path) -> (String, Vec<String>) {
    let guide = std::fs::read_to_string(path).unwrap();
    let mut reader = Reader::new();
    let (mut written, mut wrong) = (String::new(), Vec::new());
    let pieces = pieces(&guide);
    for (at, piece) in pieces.iter().enumerate() {
        let step = match piece {
            Piece::Text(line) => {
                writeln!(written, "{line}").unwrap();
                continue;
            }
            Piece::Step(step) => step,
        };
        let place = format!("{}:{}: $ {}", path.display(), step.line, step.command);
        let printed = reader.run(&step.command);
        let as_said = matches(&step.printed, &printed);
        if !as_said {
            wrong.push(format!(
                "{place}\nshould print:\n{:#?}\nprints:\n{printed:#?}",
                step.printed
            ));
        }
        let next = pieces.get(at + 1);
        let is_expected = matches!(next, Some(Piece::Step(next)) if next.command.contains("$?"));
        if reader.last_status != 0 && !is_expected {
            let status = reader.last_status;
            wrong.push(format!("{place}\nfails with {status}, and no `echo $?` follows"));
        }
        writeln!(written, "$ {}", step.command.replace('\n', "\n> ")).unwrap();
        for line in if as_said { &step.printed } else { &printed } {
            writeln!(written, "{line}").unwrap();
        }
    }
    (written, wrong)
}

fn guides() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut guides: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|ext| ext == "md")).collect();
    guides.sort();
    guides
}

#[test]
fn the_guides_do_what_they_say() {
    let update = std::env::var_os("ZAEL_UPDATE_GUIDES").is_some();
    let guides = guides();
    assert!(!guides.is_empty());
    let mut wrong = Vec::new();
    for guide in guides {
        let (written, mut found) = follow(&guide);
        if update {
            std::fs::write(&guide, written).unwrap();
        }
        wrong.append(&mut found);
    }
    assert!(update || wrong.is_empty(), "{}", wrong.join("\n\n"));
}

/// The targets of a page's links within the repository, without their fragments.
fn links(page: &str) -> Vec<&str> {
    let mut in_block = false;
    let text = page.lines().filter(|line| {
        let is_fence = line.starts_with("```");
        in_block ^= is_fence;
        !is_fence && !in_block
    });
    let starts = text.flat_map(|line| line.split("](").skip(1));
    let targets = starts.filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains("://")).collect()
}

#[test]
fn links_between_pages_lead_somewhere() {
    for guide in guides() {
        let page = std::fs::read_to_string(&guide).unwrap();
        for link in links(&page) {
            let target = guide.parent().unwrap().join(link);
            assert!(target.is_file(), "{}: there is no {link}", guide.display());
        }
    }
    let page = "[a](b.md) [c](d.md#e), [f](#g)\n```text\n[h](i.md)\n```\n[j](https://k) [l](../m)";
    assert_eq!(links(page), ["b.md", "d.md", "../m"]);
}

#[test]
fn the_index_names_every_guide() {
    let guides = guides();
    let index = guides.iter().find(|path| path.ends_with("README.md")).unwrap();
    let page = std::fs::read_to_string(index).unwrap();
    for guide in guides.iter().filter(|path| *path != index) {
        let name = guide.file_name().unwrap().to_str().unwrap();
        assert!(links(&page).contains(&name), "{} does not name {name}", index.display());
    }
}

#[test]
fn what_a_guide_says_is_compared_line_by_line() {
    for (said, line, same) in [
        ("abc", "abc", true),
        ("abc", "abcd", false),
        ("a…c", "abbbc", true),
        ("a…c", "abbb", false),
        ("…", "", true),
        ("a … b … c", "a 1 b 2 c", true),
        ("a … b … c", "a 1 c", false),
    ] {
        assert_eq!(line_matches(said, line), same, "{said:?} and {line:?}");
    }
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    assert!(matches(&lines("a\n…\nz"), &lines("a\nb\nc\nz")));
    assert!(!matches(&lines("a\n…\nz"), &lines("a\nb\nc")));
    assert!(!matches(&lines("a"), &lines("a\nb")));
    assert!(!matches(&lines("a\nb"), &lines("a")));
}
