//! The tier over a folder of a file system.

use super::*;
use crate::prefix_folder::PrefixFolder;

#[cfg(unix)]
#[test]
fn a_folder_that_others_can_write_to_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.prefixes");
    std::fs::create_dir(&path).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for (path, mode, failures) in [(&path, 0o770, 0), (&path, 0o777, 1), (&link, 0o700, 1)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        let bench = Bench::over(Arc::new(PrefixFolder::new(path.clone())), terms());
        assert_eq!(bench.stats.prefix_disk_failures.get(), failures, "{mode:o}");
    }
}

#[test]
fn entries_are_kept_in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/m.prefixes");
    let open = || Bench::over(Arc::new(PrefixFolder::new(path.clone())), terms());
    let mut bench = open();
    for of in 0..3 {
        bench.offer(PREFIX, 5, &tokens(of));
    }
    bench.settle();
    // Two servers on one folder: the second one has no disk, and the first one's files stay.
    let mut second = open();
    second.offer(PREFIX, 5, &tokens(9));
    assert_eq!(second.read(PREFIX, 5, &tokens(0)), None);
    assert_eq!(second.stats.prefix_disk_failures.get(), 1);
    drop(second);
    assert!(bench.read(PREFIX, 5, &tokens(0)).is_some());
    drop(bench);
    // A file that is no entry, of other names, and what a killed process has left.
    std::fs::write(path.join("0000000000000077.prefix"), "no entry").unwrap();
    std::fs::write(path.join("0000000000000078.new"), "half of one").unwrap();
    let strange = [
        "+00000000000000f.prefix",
        "00000000000000AB.prefix",
        "notes.txt",
    ];
    for name in strange {
        std::fs::write(path.join(name), "of somebody").unwrap();
    }
    std::fs::create_dir(path.join("0000000000000079.new")).unwrap();
    let mut bench = open();
    for of in 0..3 {
        assert_eq!(bench.read(PREFIX, 5, &tokens(of)), Some(tokens(of)));
    }
    let names = std::fs::read_dir(&path).unwrap();
    let mut names: Vec<_> = names
        .map(|it| it.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let expected = [
        "+00000000000000f.prefix",
        "0000000000000000.prefix",
        "0000000000000001.prefix",
        "0000000000000002.prefix",
        "0000000000000079.new",
        "00000000000000AB.prefix",
        "lock",
        "notes.txt",
    ];
    assert_eq!(names, expected);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |name: &str| {
            let metadata = std::fs::metadata(path.join(name)).unwrap();
            metadata.permissions().mode() & 0o777
        };
        assert_eq!(["", expected[1], "lock"].map(mode), [0o700, 0o600, 0o600]);
    }
}

#[cfg(unix)]
#[test]
fn links_and_pipes_in_a_folder_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.prefixes");
    let open = || Bench::over(Arc::new(PrefixFolder::new(path.clone())), terms());
    let mut bench = open();
    bench.offer(PREFIX, 5, &tokens(1));
    bench.settle();
    drop(bench);
    let other = folder.path().join("other");
    std::fs::rename(path.join("0000000000000000.prefix"), &other).unwrap();
    std::os::unix::fs::symlink(&other, path.join("0000000000000000.prefix")).unwrap();
    let pipe = path.join("0000000000000001.prefix");
    let made = std::process::Command::new("mkfifo").arg(pipe).status();
    assert!(made.unwrap().success());
    let mut bench = open();
    assert_eq!(bench.read(PREFIX, 5, &tokens(1)), None);
    assert!(other.exists());
    drop(bench);
    std::fs::remove_file(path.join("lock")).unwrap();
    std::os::unix::fs::symlink(&other, path.join("lock")).unwrap();
    let bench = open();
    assert_eq!(bench.stats.prefix_disk_failures.get(), 1);
}
