use super::*;
use crate::testing::ToyModel;
use crate::{ConditionalSplice, Decision, Mask, Sample, Vars};

fn controller<C: Controller>(argument: &str) -> Result<NativeController<C>, ControllerPanic> {
    NativeController::new(
        Arc::new(ToyModel::new()),
        argument,
        Arc::new(SharedVariables::default()),
    )
}

/// Does what its argument names.
#[derive(Clone, Default)]
struct Does {
    count: u32,
}

impl Controller for Does {
    fn init(&mut self, prompt: &[Token]) -> Init {
        self.count = prompt.len() as u32;
        Init::default()
    }

    fn step(&mut self, _step: Step<'_>) -> Decision {
        self.count += 1;
        match crate::arg::<String>().as_str() {
            "panic" => panic!("at {}", self.count),
            "write" => {
                assert_eq!(Vars::read("n"), None);
                assert_eq!(Vars::replace("n", 1, "x"), Err(None));
                assert_eq!(Vars::write("n", "a"), 1);
                assert_eq!(Vars::append("n", "b"), 2);
                assert_eq!(
                    Vars::replace("n", 1, "x").unwrap_err().unwrap().text(),
                    "ab"
                );
                assert_eq!(Vars::replace("n", 2, "c"), Ok(3));
                assert_eq!(Vars::update("n", |old| [old, b"d"].concat()), b"cd");
                assert_eq!(Vars::update("m", |old| [old, b"e"].concat()), b"e");
                Decision::Noop
            }
            "large" => {
                Vars::write("n", vec![0; (1 << 20) + 1]);
                Decision::Noop
            }
            _ => Sample::new(Mask::all())
                .temperature(0.5)
                .splice(ConditionalSplice {
                    when_sampled: vec![1],
                    backtrack: 1,
                    tokens: vec![2],
                })
                .into(),
        }
    }
}

/// AI-641
#[test]
fn ai_641_panics_are_failures_of_the_controller() {
    let mut panics = controller::<Does>("panic").unwrap();
    panics.begin(&[1, 2]).unwrap();
    assert_eq!(
        panics.step(Step::default()),
        Err(ControllerPanic("at 3".into()))
    );
    assert_eq!(panics.take_logs(), "at 3\n");
}

/// AI-951
#[test]
fn ai_951_variables_have_versions() {
    let mut writes = controller::<Does>("write").unwrap();
    assert_eq!(writes.step(Step::default()).unwrap(), [Branch::Noop]);
    let written = writes.take_writes();
    let shown: Vec<_> = written
        .iter()
        .map(|write| (write.name.as_str(), write.append, write.when_version_is))
        .collect();
    let expected = [
        ("n", false, None),
        ("n", true, None),
        ("n", false, Some(2)),
        ("n", false, Some(3)),
        ("m", true, None),
        ("m", false, Some(1)),
    ];
    assert_eq!(shown, expected);
    let large = controller::<Does>("large").unwrap().step(Step::default());
    assert_eq!(large, Err(ControllerPanic("storage limit: value".into())));
}

#[test]
fn forks_are_copies() {
    let mut parent = controller::<Does>("").unwrap();
    parent.begin(&[]).unwrap();
    parent.step(Step::default()).unwrap();
    let mut child = parent.fork();
    child.step(Step::default()).unwrap();
    assert_eq!(
        (parent.controller().count, child.controller().count),
        (1, 2)
    );
}

#[test]
#[should_panic = "only while a controller runs"]
fn host_functions_need_a_running_controller() {
    let _ = crate::eos_token();
}
