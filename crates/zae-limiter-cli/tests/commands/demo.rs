use std::time::Duration;

use crate::session::Session;

#[test]
fn the_whole_run_in_a_pipe() {
    let mut session = Session::new();
    assert_eq!(session.run("demo"), 0);
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn other_stores_and_other_traffic() {
    let mut session = Session::new();
    session.run("demo --seconds 2 --seed 7 --store memory: -o json");
    let file = session.folder().join("limits.db");
    session.env.insert("ZAEL_STORE".to_owned(), format!("sqlite:{}", file.display()));
    session.run("demo --seconds 1 -q");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn nothing_is_left_of_its_namespace() {
    let mut session = Session::new();
    let url = format!("sqlite:{}", session.folder().join("limits.db").display());
    session.run(&format!("demo --seconds 3 -q --store {url}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let limiter = zae_limiter::open(&url).await.unwrap();
        let names = limiter.namespaces().list().all().await.unwrap();
        let names: Vec<&str> = names.iter().map(|namespace| namespace.name.as_str()).collect();
        assert_eq!(names, ["default"]);
        assert!(limiter.namespaces().orphans().all().await.unwrap().is_empty());
    });
}

#[test]
fn ctrl_c_ends_it_early_with_a_summary() {
    let mut session = Session::new();
    session.interrupt_after = Some(Duration::from_millis(4_500));
    assert_eq!(session.run("demo"), 130);
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn on_a_terminal_it_is_drawn_over() {
    let mut session = Session::new().on_a_terminal("");
    session.run("demo --seconds 1");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn no_line_of_the_picture_wraps() {
    for columns in [10, 40, 60, 79, 80, 81, 100, 200] {
        let mut session = Session::new().on_a_terminal("");
        session.terminal.size = Some((columns, 24));
        session.run("demo --seconds 1 --color never");
        let drawn = session.transcript.split("\u{241b}[J").nth(2).unwrap();
        assert!(drawn.contains("acme"), "{drawn}");
        for line in drawn.lines() {
            let line = line.replace("␛[K", "").replace("␛[14A␍", "");
            assert!(line.chars().count() < usize::from(columns), "{columns}: {line}");
        }
    }
}
