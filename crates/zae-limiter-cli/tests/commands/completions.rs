use crate::session::Session;

#[test]
fn for_every_shell() {
    let mut session = Session::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (status, script, talk) =
            session.run_unseen(&format!("completions {shell}"), usize::MAX);
        assert_eq!((status, talk.as_str()), (0, ""), "{shell}");
        for word in ["zae-limiter", "set-limits", "with-custom-limits", "capacity"] {
            assert!(script.contains(word), "{word} is missing for {shell}");
        }
    }
    let (_, document, _) = session.run_unseen("completions fish -o json", usize::MAX);
    assert!(document.starts_with("{\n  \"shell\": \"fish\",\n  \"script\": \""), "{document}");
    session.run("completions tcsh");
    insta::assert_snapshot!(session.transcript);
}
