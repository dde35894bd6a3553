use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use zae_limiter_cli::TerminalSize;

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

/// The frames of a run as a terminal shows them: without colours, and each without what it draws over.
fn frames(session: &Session) -> Vec<String> {
    let drawn = session.transcript.split("␛[J\n");
    let drawn = drawn.flat_map(|text| text.split("␛[J"));
    drawn.map(|frame| frame.replace("␛[K", "")).collect()
}

#[test]
fn no_line_of_the_picture_wraps() {
    for columns in [10, 32, 40, 54, 60, 74, 75, 79, 80, 81, 100, 200] {
        let mut session = Session::new().on_a_terminal("");
        session.terminal.size = TerminalSize::fixed(columns, 24);
        session.run("demo --seconds 1 --color never");
        let frame = frames(&session)[2].clone();
        assert_eq!(frame.contains("acme"), columns >= 32, "{columns}: {frame}");
        for line in frame.lines() {
            let line = line.replace("␛[14A␍", "").replace("␛[1A␍", "");
            assert!(line.chars().count() < usize::from(columns).max(33), "{columns}: {line}");
        }
    }
}

/// One frame and the report, at several widths.
#[test]
fn a_narrow_terminal_has_fewer_columns() {
    let mut shown = String::new();
    for columns in [30, 40, 60, 74, 75, 80, 120] {
        let mut session = Session::new().on_a_terminal("");
        session.terminal.size = TerminalSize::fixed(columns, 24);
        session.run("demo --seconds 1 --color never");
        let frames = frames(&session);
        let report = frames.last().unwrap();
        let table = report.lines().skip_while(|line| !line.starts_with("ENTITY"));
        let table: Vec<&str> = table.take_while(|line| !line.starts_with("ALLOWED")).collect();
        for line in &table {
            assert!(line.chars().count() <= usize::from(columns), "{columns}: {line}");
        }
        writeln!(shown, "{columns} columns\n{}\n{}\n", frames[2], table.join("\n")).unwrap();
    }
    insta::assert_snapshot!(shown);
}

/// A terminal whose size is another one at each frame.
#[test]
fn a_resized_terminal_is_drawn_anew() {
    let mut session = Session::new().on_a_terminal("");
    let asked = Arc::new(AtomicUsize::new(0));
    let sizes = [(80, 24), (80, 24), (80, 24), (50, 24), (50, 24), (50, 8), (120, 30), (120, 30)];
    session.terminal.size = TerminalSize::new(move || {
        Some(sizes[asked.fetch_add(1, Ordering::Relaxed).min(sizes.len() - 1)])
    });
    session.run("demo --seconds 2 --color never");
    let clears = session.transcript.matches("␛[2J␛[H").count();
    assert_eq!(clears, 3, "the screen is cleared at each change of the size");
    let frames = frames(&session);
    insta::assert_snapshot!(frames[..frames.len() - 1].join("(next)\n"));
}
