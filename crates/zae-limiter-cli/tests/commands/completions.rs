use crate::session::Session;

#[test]
fn for_every_shell() {
    let mut session = Session::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (status, script, stderr) =
            session.run_unseen(&format!("completions {shell}"), usize::MAX);
        assert_eq!((status, stderr.as_str()), (0, ""), "{shell}");
        for word in ["zae-limiter", "set-limits", "with-custom-limits", "capacity"] {
            assert!(script.contains(word), "{word} is missing for {shell}");
        }
    }
    let (_, document, _) = session.run_unseen("completions fish -o json", usize::MAX);
    assert!(document.starts_with("{\n  \"shell\": \"fish\",\n  \"script\": \""), "{document}");
    session.run("completions tcsh");
    insta::assert_snapshot!(session.transcript);
}

/// The completions of bash for the last word.
#[cfg(unix)]
fn offered(script: &str, words: &str) -> String {
    let (before, last) = words.rsplit_once(' ').unwrap();
    let count = before.split(' ').count();
    let previous = before.rsplit(' ').next().unwrap();
    let program = format!(
        "{script}\nCOMP_WORDS=({words}); COMP_CWORD={count}\n\
         _zae__limiter zae-limiter '{last}' '{previous}'; echo \"${{COMPREPLY[*]}}\""
    );
    let output = std::process::Command::new("bash").args(["-c", &program]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
#[cfg(unix)]
fn bash_completes_subcommands_too() {
    if std::process::Command::new("bash").arg("--version").output().is_err() {
        return;
    }
    let (_, script, _) = Session::new().run_unseen("completions bash", usize::MAX);
    for (words, wanted) in [
        ("zae-limiter ent", "entity"),
        ("zae-limiter entity sh", "show"),
        ("zae-limiter entity set", "set-limits"),
        ("zae-limiter entity list --with", "--with-custom-limits"),
        ("zae-limiter resource set-defaults --li", "--limit"),
        ("zae-limiter usage list -w d", "daily"),
    ] {
        assert_eq!(offered(&script, words), wanted, "{words}");
    }
}
